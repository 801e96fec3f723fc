"""What runtimes make of one file: perplexity, KL divergence and top token against float32.

    python tests/bench/fidelity.py MODEL.gguf... [--python INTERPRETER] [--windows 8] [--window 512]

The judge is Hugging Face transformers in float32 on the file's own dequantized weights. Everyone
gets the same token ids, cut by edgellm's tokenizer into windows that begin on an empty context;
every token of a window but the first is scored. One window of the judge's logits is in memory at a
time, and one of a runtime's in a temporary file.

A runtime is a name and options, which for edgellm are those of `edgellm.load`, and `through=decode`
for one token at a time: `"edgellm kv_format=f32"`, `"llama.cpp kv=q8_0"`. Each has a process of its
own; llama.cpp is used through `llama-cpp-python`, built from source, in the interpreter that
`--python` names, and with `extra_bufts=0` without repacked weights and AMX, which some virtual
machines announce and do not have. One that does not start is left out, with a word about it.

The texts, unless `--text NAME=FILE` names others, come with Python and are not those that models
are calibrated on: code is `argparse.py`, prose the chapters typesseq, objects, exceptions,
formatstrings and debugger of its manual (`pydoc_data.topics`). Published figures are of these, in
Python 3.11, over eight windows of each.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from workers import Message, Worker, serve, started

if TYPE_CHECKING:
    from edgellm.measure.quality import Comparison

RUNTIMES = (
    "edgellm",
    "edgellm kv_format=f32",
    "edgellm kv_format=k4v4",
    "edgellm through=decode",
    "edgellm prefill=cpu precision=w8a8",
    "llama.cpp",
    "llama.cpp kv=q8_0",
)
# Rows of logits that are compared at a time.
ROWS = 64


class EdgeLLM:
    def __init__(self, model: str, window: int, threads: int, options: dict[str, Any]) -> None:
        from edgellm.llm import load

        self.through = options.pop("through", "prefill")
        self.engine = load(model, ctx_size=window, threads=threads, **options).engine

    def logits(self, tokens: list[int]) -> Iterator[np.ndarray]:
        """After each token but the last, `[rows, V]`, some rows at a time."""
        from edgellm.measure.perplexity import window_logits

        for _, rows in window_logits(self.engine, tokens, through=self.through):
            yield rows


class LlamaCpp:
    def __init__(self, model: str, window: int, threads: int, options: dict[str, Any]) -> None:
        import llama_cpp
        from runtimes import LlamaCpp as Loaded

        if options.pop("extra_bufts", 1) == 0:
            parameters = llama_cpp.llama_model_default_params()
            parameters.use_extra_bufts = False
            llama_cpp.llama_model_default_params = lambda: parameters
        kv = options.pop("kv", "")
        self.loaded = Loaded(model, ctx_size=window, threads=threads, kv=kv, genai="")

    def logits(self, tokens: list[int]) -> Iterator[np.ndarray]:
        api, context = self.loaded.api, self.loaded.context
        api.llama_memory_clear(api.llama_get_memory(context), True)
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        api.llama_batch_free(batch)
        pointer = ctypes.cast(api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        shape = len(tokens), self.loaded.vocab_size
        yield np.ctypeslib.as_array(pointer, shape)[:-1]


def options_of(words: Iterable[str]) -> dict[str, Any]:
    """Options that are written as `NAME=VALUE`; digits are numbers."""

    def read(value: str) -> int | float | str:
        if value.isdigit():
            return int(value)
        return float(value) if value.replace(".", "", 1).isdigit() else value

    return {name: read(value) for name, _, value in (word.partition("=") for word in words)}


CLASSES: dict[str, type[EdgeLLM] | type[LlamaCpp]] = {"edgellm": EdgeLLM, "llama.cpp": LlamaCpp}


def work(runtime: str, model: str, window: int, threads: int) -> None:
    """The worker's side; see `serve`."""

    def load() -> tuple[Callable[[Message], Message], Message]:
        name, *options = runtime.split()
        loaded = CLASSES[name](model, window, threads, options_of(options))

        def answer(question: Message) -> Message:
            rows = 0
            with open(question["out"], "wb") as out:
                for part in loaded.logits(question["tokens"]):
                    part.astype(np.float32, copy=False).tofile(out)
                    rows, width = rows + len(part), part.shape[1]
            return {"shape": (rows, width)}

        return answer, {}

    serve(load)


class LogitWorker(Worker):
    """A runtime's process, seen from here."""

    def __init__(self, name: str, model: str, arguments: argparse.Namespace) -> None:
        python = sys.executable if name.startswith("edgellm") else arguments.python
        command = [python, __file__, model, "--work", name, "--threads", str(arguments.threads)]
        command += ["--window", str(arguments.window)]
        super().__init__(name, command)

    @contextmanager
    def logits(self, tokens: list[int]) -> Iterator[np.ndarray]:
        with tempfile.NamedTemporaryFile() as file:
            shape = tuple(self.ask({"tokens": tokens, "out": file.name})["shape"])
            yield np.memmap(file.name, np.float32, "r", shape=shape)


class Judge:
    """transformers in float32."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        loaded = AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32
        )
        self._model = loaded.eval()

    def logits(self, tokens: list[int]) -> np.ndarray:
        with self._torch.no_grad():
            found: np.ndarray = self._model(self._torch.tensor([tokens])).logits[0, :-1].numpy()
        return found


def windows_of(model: str, text: str, count: int, size: int) -> list[list[int]]:
    """Token ids, as everyone gets them; with a begin token where the model asks for one."""
    from edgellm.store.prepare import prepare
    from edgellm.text.tokenizer import Tokenizer

    bundle = prepare(model, precisions=("packed",))
    tokenizer = Tokenizer(bundle.path, bundle.manifest.tokenizer, rows=bundle.config.vocab_size)
    bos = [t for t in tokenizer.encode("")[:1] if t == tokenizer.bos_id]
    size -= len(bos)
    ids = tokenizer.encode(text, add_bos=False)[: count * size]
    return [[*bos, *ids[i : i + size]] for i in range(0, len(ids) - size + 1, size)]


def compare(
    judge: Judge, workers: Sequence[LogitWorker], windows: Sequence[list[int]]
) -> dict[str, Comparison]:
    """Everyone beside the judge on the same windows."""
    from edgellm.measure.quality import Comparison

    parts: dict[str, list[Comparison]] = {worker.name: [] for worker in workers}
    for done, tokens in enumerate(windows, 1):
        exact = judge.logits(tokens)
        for worker in workers:
            with worker.logits(tokens) as logits:
                if logits.shape != exact.shape:
                    sys.exit(f"{worker.name}: logits {logits.shape}; the judge's {exact.shape}")
                for i in range(0, len(exact), ROWS):
                    rows = slice(i, i + ROWS)
                    parts[worker.name].append(Comparison.of(logits[rows], exact[rows], tokens, i))
        print(f"window {done} of {len(windows)}", file=sys.stderr, flush=True)
    return {name: Comparison.joined(found) for name, found in parts.items()}


def table(found: dict[str, dict[str, Comparison]]) -> str:
    """A Markdown table of all texts: perplexity against the judge's, KL divergence, top token."""
    names = list(next(iter(found.values())))
    head = "".join(f" {text}: perplexity | KL divergence | same top token |" for text in found)
    lines = [f"| |{head}", "|---" * (1 + 3 * len(found)) + "|"]
    exact = (float(np.exp(-c[names[0]].exact_logprobs.mean())) for c in found.values())
    lines.append("| float32 |" + "".join(f" {value:.4f} | | |" for value in exact))
    for name in names:
        cells = []
        for comparisons in found.values():
            c = comparisons[name]
            change = float(np.exp(c.exact_logprobs.mean() - c.logprobs.mean())) - 1
            cells += [f"{change:+.2%}", f"{c.divergences.mean():.5f}", f"{c.same_top.mean():.2%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def default_texts() -> dict[str, str]:
    from pydoc_data import topics

    chapters = "typesseq", "objects", "exceptions", "formatstrings", "debugger"
    prose = "\n\n".join(topics.topics[name] for name in chapters)
    return {"prose": prose, "code": Path(argparse.__file__).read_text(encoding="utf-8")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES), help="names, with commas")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--windows", type=int, default=8, help="of each text")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", default=sys.executable, help="one that has llama-cpp-python")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        window, threads = arguments.window, arguments.threads
        return work(arguments.work, arguments.models[0], window, threads)
    given = (text.partition("=") for text in arguments.text)
    texts = {name: Path(file).read_text(encoding="utf-8") for name, _, file in given}
    for model in arguments.models:
        windows = {
            name: windows_of(model, text, arguments.windows, arguments.window)
            for name, text in (texts or default_texts()).items()
        }
        start = partial(LogitWorker, model=model, arguments=arguments)
        with started(arguments.runtimes.split(","), start) as workers:
            judge = Judge(Path(model))
            comparisons = {name: compare(judge, workers, parts) for name, parts in windows.items()}
        counts = ", ".join(f"{len(parts)} of {name}" for name, parts in windows.items())
        heading = f"{Path(model).name}, windows of {arguments.window} tokens: {counts}"
        print(f"\n{heading}\n\n{table(comparisons)}")


if __name__ == "__main__":
    main()
