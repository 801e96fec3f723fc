"""edgellm beside other runtimes: the same weights, the same token ids, turn and turn about.

    python tests/bench/peers.py [--model FILE.gguf] [--runtimes edgellm,llama.cpp,openvino,genai]

Each runtime lives in a process of its own, which is loaded once, sleeps while others run, and
answers one question: evaluate these tokens on an empty context, then generate n more greedily; how
long did both take? Rounds are interleaved, so that a slow minute of the machine hits everyone; the
table has medians and their ratios to edgellm. Before anything is timed, everyone continues real
text, and the output says where whoever goes another way leaves.

llama.cpp is used through `llama-cpp-python`, to be built from source for this machine; the others
are `openvino-genai` and `onnxruntime-genai` (the latter needs `--genai FOLDER`, made by its model
builder with `-p int4 -e cpu`). A runtime that is not installed is left out, with a word about it.
`--python` names another interpreter that has the peers, so that edgellm's own environment stays
clean.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TESTS = ("pp20", "pp512", "pp2048", "pp4096", "tg128", "tg64@2048", "tg64@4096")
RUNTIMES = ("edgellm", "llama.cpp", "llama.cpp q8_0", "openvino", "genai")
GATE_TOKENS = 16
# Time for the spinning threads of one runtime to fall asleep before the next one starts.
PAUSE_S = 0.3
TEXT = "The history of the steam engine begins in the first century, when"


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
        from edgellm.llm import load

        self.engine = load(model, ctx_size=ctx_size, threads=threads).engine

    def run(self, prompt: list[int], count: int) -> Run:
        engine, sequence = self.engine, self.engine.cache.sequence()
        with engine.lock:
            start = time.perf_counter()
            tokens = [int(engine.prefill.run(prompt, sequence).argmax())]
            middle = time.perf_counter()
            for _ in range(count):
                tokens.append(int(engine.decoder.step(tokens[-1], sequence).argmax()))
            end = time.perf_counter()
            sequence.truncate(0)
        return Run(middle - start, end - middle, tokens)


class LlamaCpp:
    """The C interface, without the Python wrapper's own loop."""

    def __init__(self, model: str, *, ctx_size: int, threads: int, kv: str, genai: str) -> None:
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
        context.n_threads = context.n_threads_batch = threads
        context.flash_attn = True
        if kv == "q8_0":
            context.type_k = context.type_v = llama_cpp.GGML_TYPE_Q8_0
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def _eval(self, tokens: Sequence[int]) -> int:
        array = (self.api.llama_token * len(tokens))(*tokens)
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama_decode failed")
        pointer = self.api.llama_get_logits_ith(self.context, -1)
        logits = self.numpy.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)
        )
        return int(logits.argmax())

    def run(self, prompt: list[int], count: int) -> Run:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
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
        found = self.pipeline.generate(inputs, config)
        times = found.perf_metrics
        first = times.get_ttft().mean / 1e3
        rest = times.get_tpot().mean / 1e3 * count if count else 0.0
        return Run(first, rest, [int(t) for t in found.tokens[0]])


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


def work(arguments: argparse.Namespace) -> None:
    """The worker's side: load, say so, then answer questions, one JSON line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints does not get between the answers
    name, _, kv = arguments.work.partition(" ")
    begin = time.perf_counter()
    runtime: Runtime = CLASSES[name](
        arguments.model,
        ctx_size=arguments.ctx_size,
        threads=arguments.threads,
        kv=kv,
        genai=arguments.genai,
    )
    _answer(answers, {"load_s": time.perf_counter() - begin})
    for line in sys.stdin:
        question = json.loads(line)
        if "prompt" in question:
            _answer(answers, vars(runtime.run(question["prompt"], question["count"])))
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            _answer(answers, {"peak_rss": peak})


def _answer(stream: Any, values: dict[str, Any]) -> None:
    stream.write(json.dumps(values) + "\n")
    stream.flush()


class Worker:
    """A runtime's process, seen from here."""

    def __init__(self, name: str, arguments: argparse.Namespace, *, ctx_size: int) -> None:
        self.name = name
        own = name == "edgellm"
        command = [sys.executable if own else arguments.python, __file__, "--work", name]
        command += ["--model", arguments.model, "--ctx-size", str(ctx_size)]
        command += ["--threads", str(arguments.threads), "--genai", arguments.genai]
        self._start = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.load_s = float(self._read()["load_s"])

    def run(self, prompt: list[int], count: int) -> Run:
        return Run(**self._ask({"prompt": prompt, "count": count}))

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds from the start of the process to its first token; to be called first."""
        self.run(prompt, 0)
        return time.perf_counter() - self._start

    def peak_rss(self) -> int:
        return int(self._ask({})["peak_rss"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def started(
    names: Sequence[str], arguments: argparse.Namespace, ctx_size: int
) -> Iterator[list[Worker]]:
    """A worker for each runtime that works here; the others are named."""
    workers = []
    for name in names:
        try:
            workers.append(Worker(name, arguments, ctx_size=ctx_size))
        except RuntimeError:
            print(f"{name}: not installed, or it does not take this model; left out", flush=True)
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def parse(test: str) -> tuple[int, int]:
    """A test's prompt tokens and generated tokens."""
    if test.startswith("pp"):
        return int(test[2:]), 0
    generated, _, depth = test[2:].partition("@")
    return int(depth or 8), int(generated)


def gate(workers: Sequence[Worker], prompt: list[int]) -> list[str]:
    """Everyone continues real text; the lines say after how many tokens who goes another way.

    Roundings differ, so near-ties do too; a first token that differs means another model or another
    tokenizer, and nothing is timed.
    """
    expected = workers[0].run(prompt, GATE_TOKENS).tokens
    lines = []
    for worker in workers[1:]:
        found = worker.run(prompt, GATE_TOKENS).tokens
        same = next(
            (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
            GATE_TOKENS,
        )
        if same == 0:
            sys.exit(f"{worker.name}: begins with another token than edgellm; nothing is timed")
        lines.append(f"{worker.name}: the first {same} of {GATE_TOKENS} greedy tokens are the same")
    return lines


def measure(
    workers: Sequence[Worker], tests: Sequence[str], ids: list[int], rounds: int
) -> dict[str, dict[str, float]]:
    """Median tokens per second, by test and runtime."""
    rates: dict[str, dict[str, list[float]]] = {t: {w.name: [] for w in workers} for t in tests}
    for round_ in range(rounds + 1):
        for test in tests:
            prompt, generated = parse(test)
            for worker in workers[round_ % len(workers) :] + workers[: round_ % len(workers)]:
                time.sleep(PAUSE_S)
                found = worker.run(ids[:prompt], generated)
                rate = generated / found.decode_s if generated else prompt / found.prefill_s
                if round_:
                    rates[test][worker.name].append(rate)
    return {t: {n: statistics.median(r) for n, r in row.items()} for t, row in rates.items()}


def starts(
    names: Sequence[str], arguments: argparse.Namespace, ids: list[int]
) -> dict[str, list[float]]:
    """Medians of: seconds from process start to first token, load seconds, peak MB at ctx 2048."""
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds + 1):
        for name in names:
            worker = Worker(name, arguments, ctx_size=2048)
            first = worker.first_token_s(ids[:20])
            worker.run(ids[:1900], 100)
            found[name].append([first, worker.load_s, worker.peak_rss() / 1e6])
            worker.close()
    return {
        n: [statistics.median(c) for c in zip(*rows[1:], strict=True)] for n, rows in found.items()
    }


def table(rows: dict[str, dict[str, float]], names: Sequence[str], *, smaller: bool = False) -> str:
    """A Markdown table; in parentheses how many times better edgellm is."""
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for test, row in rows.items():
        cells = []
        for name in names:
            value = row[name]
            ratio = value / row["edgellm"] if smaller else row["edgellm"] / value
            text = f"{value:.0f}" if value >= 10 else f"{value:.2f}"
            cells.append(text if name == "edgellm" else f"{text} ({ratio:.2f}x)")
        lines.append(f"| {test} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def requantize(model: Path, target: Path, python: str) -> None:
    """A Q4_0 file of the same model, made by llama.cpp."""
    code = (
        "import llama_cpp as l, sys\n"
        "p = l.llama_model_quantize_default_params()\n"
        "p.ftype, p.allow_requantize, p.nthread = l.LLAMA_FTYPE_MOSTLY_Q4_0, True, 2\n"
        "l.llama_backend_init()\n"
        "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))\n"
    )
    partial = target.with_suffix(".partial")
    subprocess.run([python, "-c", code, str(model), str(partial)], check=True, capture_output=True)
    partial.replace(target)


def default_model(python: str) -> str:
    """SmolLM2-135M-Instruct as Q4_0."""
    from edgellm.home import models_dir
    from edgellm.sources import DEFAULT_MODEL, resolve

    target = models_dir() / "smollm2-135m-instruct-q4_0.gguf"
    if not target.exists():
        requantize(resolve(DEFAULT_MODEL).path, target, python)
    return str(target)


def cpu_name() -> str:
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="", help="a GGUF file  [default: SmolLM2 as Q4_0]")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--tests", default=",".join(TESTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--genai", default="", help="model folder of onnxruntime-genai")
    parser.add_argument("--ctx-size", type=int, default=8192, help=argparse.SUPPRESS)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments)
    arguments.model = arguments.model or default_model(arguments.python)
    from edgellm.llm import load

    tokenizer = load(arguments.model, ctx_size=256).engine.tokenizer
    gate_ids = tokenizer.encode(TEXT)
    text = Path(__file__).read_text(encoding="utf-8") * 3
    ids = tokenizer.encode(text)[:4096]
    tests = [t for t in arguments.tests.split(",") if t]
    with started(arguments.runtimes.split(","), arguments, 8192) as workers:
        names = [worker.name for worker in workers]
        print("\n".join(gate(workers, gate_ids)), flush=True)
        speeds = measure(workers, tests, ids, arguments.rounds)
    first = starts(names, arguments, ids)
    print(f"\n{Path(arguments.model).name}, {cpu_name()}, {arguments.threads} threads\n")
    print("tokens/s, medians; in parentheses how many times faster edgellm is\n")
    print(table(speeds, names))
    print("\nsmaller is better; in parentheses how many times smaller edgellm is\n")
    labels = ("process start to first of 20 tokens, s", "load, s", "peak RSS at ctx 2048, MB")
    print(
        table(
            {label: {n: first[n][i] for n in names} for i, label in enumerate(labels)},
            names,
            smaller=True,
        )
    )


if __name__ == "__main__":
    main()
