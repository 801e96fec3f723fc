"""edgellm beside an older edgellm: the same file, the same tokens, turn and turn about.

    python tests/bench/older.py MODEL.gguf --python INTERPRETER [--tests pp512,tg128,4x48,gap]

INTERPRETER is one that has the older edgellm installed, from a clone of that commit. Both are asked
through the Python API, each in a process that is loaded once and sleeps while the other runs.

* `ppN`: tokens/s of a prompt of N tokens that is not cached, up to its first token.
* `tgN@D`: tokens/s of N tokens behind D that are cached; `tgN` is behind 64.
* `SxN`: tokens/s of S sequences together, N tokens each, behind 64 each.
* `gap`: largest time in ms between two tokens of a stream while another thread's prompt of 3,800
  tokens is computed.
* `start`: ms of `from edgellm import load`, of loading, and peak MB after a prompt of 1,900 tokens,
  each time in a process of its own.

A cell has the median and the ratio to the older one's; above 1.00 is better than the older one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workers import Message, Worker, serve, started

TESTS = "pp16,pp128,pp512,pp2048,tg128,tg64@2048,tg64@3840,4x48,16x48,gap,start"
CTX_SIZE = 4096
PAUSE_S = 0.3
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "speculate": False}


class Asked:
    """The worker's edgellm, whichever it is."""

    def __init__(self, model: str, *, threads: int) -> None:
        from edgellm import load

        self.llm = load(model, ctx_size=CTX_SIZE, cache_size=32 * 1024, threads=threads)
        self._seeds = itertools.count()

    def answer(self, test: str) -> list[float]:
        if test == "gap":
            return [1e3 * self._gap()]
        if test == "start":
            self.llm.generate(self._prompt(1900), max_tokens=100, **GREEDY)
            status = Path("/proc/self/status").read_text()
            return [int(status.partition("VmHWM:")[2].split()[0]) / 1e3]
        if test.startswith("pp"):
            count = int(test[2:])
            return [count / self._seconds([self._prompt(count)], 1)]
        if test.startswith("tg"):
            tokens, _, depth = test[2:].partition("@")
            sequences, count, behind = 1, int(tokens), int(depth or 64)
        else:
            sequences, count = map(int, test.split("x"))
            behind = 64
        prompts = [self._prompt(behind) for _ in range(sequences)]
        for prompt in prompts:
            self.llm.generate(prompt, max_tokens=1)
        return [sequences * count / self._seconds(prompts, count)]

    def _prompt(self, length: int) -> list[int]:
        seed = next(self._seeds)
        return [(31 * i + 977 * seed + 7) % 10_000 for i in range(length)]

    def _seconds(self, prompts: list[list[int]], count: int) -> float:
        start = time.perf_counter()
        if len(prompts) == 1:
            self.llm.generate(prompts[0], max_tokens=count, **GREEDY)
        else:
            for answer in self.llm.batch(prompts, max_tokens=count, **GREEDY):
                answer.result()
        return time.perf_counter() - start

    def _gap(self) -> float:
        """Seconds."""
        prompt, stop, times = self._prompt(3800), threading.Event(), list[float]()
        begun = threading.Event()

        def stream() -> None:
            for _ in self.llm.stream(self._prompt(64), max_tokens=3000, cancel=stop, **GREEDY):
                times.append(time.perf_counter())
                if len(times) == 32:
                    begun.set()

        reader = threading.Thread(target=stream, daemon=True)
        reader.start()
        begun.wait()
        start = time.perf_counter()
        self.llm.generate(prompt, max_tokens=1)
        end = time.perf_counter()
        stop.set()
        reader.join()
        during = [at for at in times if start <= at <= end]
        return max(b - a for a, b in itertools.pairwise([start, *during]))


def work(arguments: argparse.Namespace) -> None:
    """The worker's side; see `serve`."""

    def load() -> tuple[Callable[[Message], Message], Message]:
        begin = time.perf_counter()
        from edgellm import load as _  # noqa: F401

        imported = time.perf_counter()
        asked = Asked(arguments.model, threads=arguments.threads)
        times = [1e3 * (imported - begin), 1e3 * (time.perf_counter() - imported)]
        return lambda question: {"found": asked.answer(question["test"])}, {"times": times}

    serve(load)


def worker(name: str, arguments: argparse.Namespace) -> Worker:
    python = arguments.python if name == "older" else sys.executable
    options = ["--python", python, "--threads", str(arguments.threads), "--work", name]
    return Worker(name, [python, __file__, arguments.model, *options])


def turns(
    arguments: argparse.Namespace, tests: list[str]
) -> Iterator[tuple[str, str, list[float]]]:
    """Test, version and numbers, for each round but the first."""
    names = ["older", "newer"]
    with started(names, lambda name: worker(name, arguments)) as both:
        for turn in range(arguments.rounds + 1):
            for test in tests:
                for each in both[:: 1 if turn % 2 else -1]:
                    time.sleep(PAUSE_S)
                    found = each.ask({"test": test})["found"]
                    if turn and test != "start":
                        yield test, each.name, found
    if "start" in tests:
        for turn in range(arguments.rounds + 1):
            for name in names[:: 1 if turn % 2 else -1]:
                each = worker(name, arguments)
                found = [*each.loaded["times"], *each.ask({"test": "start"})["found"]]
                each.close()
                if turn:
                    yield "start", name, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--python", required=True, help="interpreter that has the older edgellm")
    parser.add_argument("--tests", default=TESTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments)
    from edgellm.machine import cpu_name

    rows: dict[str, dict[str, list[float]]] = {}
    for test, name, found in turns(arguments, arguments.tests.split(",")):
        labels = ["import ms", "load ms", "peak MB"] if test == "start" else [test]
        for label, value in zip(labels, found, strict=True):
            rows.setdefault(label, {}).setdefault(name, []).append(value)
    print(f"{Path(arguments.model).name}, {cpu_name()}, {arguments.threads} threads\n")
    print("| | older | newer | ratio | all of older; newer |\n|---|---|---|---|---|")
    for label, both in rows.items():
        older, newer = (statistics.median(both[name]) for name in ("older", "newer"))
        ratio = older / newer if label.endswith(("ms", "MB", "gap")) else newer / older
        every = "; ".join(" ".join(f"{x:.0f}" for x in both[n]) for n in ("older", "newer"))
        print(f"| {label} | {older:.1f} | {newer:.1f} | {ratio:.2f} | {every} |")
    return None


if __name__ == "__main__":
    main()
