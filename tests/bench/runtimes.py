"""The runtimes that peers.py compares, each behind the same question."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Run:
    """One answer of a worker: seconds to the first token, seconds for the others, their ids."""

    prefill_s: float
    decode_s: float
    tokens: list[int]


class Runtime(Protocol):
    """One runtime, loaded: `run` evaluates `prompt` from scratch and adds `count` + 1 tokens."""

    def run(self, prompt: list[int], count: int) -> Run: ...


class EdgeLLM:
    def __init__(self, model: str, *, ctx_size: int, threads: int, kv: str, genai: str) -> None:
        from edgellm.engine import one_sequence
        from edgellm.llm import load

        self.one_sequence = one_sequence
        self.engine = load(model, ctx_size=ctx_size, threads=threads).engine

    def run(self, prompt: list[int], count: int) -> Run:
        return self.engine.thread.call(lambda: self._run(prompt, count))

    def _run(self, prompt: list[int], count: int) -> Run:
        engine, sequence = self.engine, self.engine.cache.sequence()
        start = time.perf_counter()
        logits = self.one_sequence.compute_prompt(engine.prefill, prompt, sequence)
        tokens = [int(logits.argmax())]
        middle = time.perf_counter()
        for _ in range(count):
            tokens.append(self.one_sequence.best_next(engine.decoder, tokens[-1], sequence))
        end = time.perf_counter()
        sequence.truncate(0)
        return Run(middle - start, end - middle, tokens)


class LlamaCpp:
    """The C interface, without the Python wrapper's own loop.

    `kv` is `q8_0` for the KV cache in 8 bits, or `no-fa` for one in halves without flash attention,
    which is slower in prefill and two to four times as fast in decode at depth (0.3.36). The
    context is shared by `sequences`, each of which has its part.
    """

    def __init__(
        self,
        model: str,
        *,
        ctx_size: int,
        threads: int,
        kv: str,
        genai: str,
        sequences: int = 1,
    ) -> None:
        import llama_cpp
        import numpy as np

        self.api, self.numpy = llama_cpp, np
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), parameters)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = ctx_size, 512, 512
        context.n_seq_max = sequences
        context.n_threads = context.n_threads_batch = threads
        if kv == "no-fa":
            context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if kv == "q8_0":
            context.type_k = context.type_v = llama_cpp.GGML_TYPE_Q8_0
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def clear(self) -> None:
        """Forget all tokens."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def eval_many(self, spans: Sequence[tuple[int, int, Sequence[int]]]) -> list[int]:
        """The most likely token behind each span: a sequence, its next position, its tokens."""
        batch = self.api.llama_batch_init(sum(len(tokens) for _, _, tokens in spans), 0, 1)
        row, last = 0, []
        for sequence, start, tokens in spans:
            for position, token in enumerate(tokens, start):
                batch.token[row], batch.pos[row], batch.logits[row] = token, position, 0
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                row += 1
            batch.logits[row - 1] = 1
            last.append(row - 1)
        batch.n_tokens = row
        failed = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if failed:
            raise RuntimeError("llama_decode failed")
        return [self._best(row) for row in last]

    def _best(self, row: int) -> int:
        pointer = self.api.llama_get_logits_ith(self.context, row)
        logits = self.numpy.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)
        )
        return int(logits.argmax())

    def _eval(self, tokens: Sequence[int]) -> int:
        array = (self.api.llama_token * len(tokens))(*tokens)
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama_decode failed")
        return self._best(-1)

    def run(self, prompt: list[int], count: int) -> Run:
        self.clear()
        start = time.perf_counter()
        for i in range(0, len(prompt), 512):
            token = self._eval(prompt[i : i + 512])
        middle = time.perf_counter()
        tokens = [token]
        for _ in range(count):
            tokens.append(self._eval(tokens[-1:]))
        return Run(middle - start, time.perf_counter() - middle, tokens)


class OpenVino:
    def __init__(self, model: str, *, ctx_size: int, threads: int, kv: str, genai: str) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as ov_genai

        self.api, self.ov, self.numpy = ov_genai, ov, np
        self.pipeline = ov_genai.LLMPipeline(
            model,
            "CPU",
            ATTENTION_BACKEND="SDPA",
            INFERENCE_NUM_THREADS=threads,
            PERFORMANCE_HINT="LATENCY",
        )

    def run(self, prompt: list[int], count: int) -> Run:
        ids = self.numpy.asarray([prompt], self.numpy.int64)
        inputs = self.api.TokenizedInputs(
            self.ov.Tensor(ids), self.ov.Tensor(self.numpy.ones_like(ids))
        )
        config = self.api.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count + 1
        config.ignore_eos, config.do_sample = True, False
        config.apply_chat_template = False
        answer = self.pipeline.generate(inputs, config)
        times = answer.perf_metrics
        first = times.get_ttft().mean / 1e3
        rest = times.get_tpot().mean / 1e3 * count if count else 0.0
        return Run(first, rest, [int(t) for t in answer.tokens[0]])


class GenAi:
    def __init__(self, model: str, *, ctx_size: int, threads: int, kv: str, genai: str) -> None:
        import onnxruntime_genai

        self.api = onnxruntime_genai
        config = onnxruntime_genai.Config(genai)
        config.overlay(
            json.dumps(
                {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
            )
        )
        self.model = onnxruntime_genai.Model(config)
        self.ctx_size = ctx_size

    def run(self, prompt: list[int], count: int) -> Run:
        parameters = self.api.GeneratorParams(self.model)
        parameters.set_search_options(
            max_length=self.ctx_size, min_length=self.ctx_size, do_sample=False
        )
        generator = self.api.Generator(self.model, parameters)
        start = time.perf_counter()
        generator.append_tokens(prompt)
        generator.generate_next_token()
        middle = time.perf_counter()
        for _ in range(count):
            generator.generate_next_token()
        end = time.perf_counter()
        tokens = [int(t) for t in generator.get_sequence(0)[len(prompt) :]]
        return Run(middle - start, end - middle, tokens)


CLASSES: dict[str, type[Any]] = {
    "edgellm": EdgeLLM,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "genai": GenAi,
}
