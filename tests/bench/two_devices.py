"""Decode beside prompts: how much slower, and how fast the prompts, with two devices and with one.

    python tests/bench/two_devices.py [MODEL] [--precision w8a8] [--streams 2] [--length 1000]
                                      [--seconds 5] [--rounds 3] [--slowdown 1.1] [--speeds 4,16]

Some streams decode; alone, and while one prompt after the other is computed, in turns. Rows:

* `stall_free`: prompts and decode in the same native steps, on all cores.
* `two_devices`: the CPU provider plays the accelerator, pinned to all cores but one; decode has the
  last one.
* `two_devices, N x`: what the provider's graphs take on its cores is slept through N times as fast,
  so that no core is busy with it; attention and decode are real, and decode has all cores. What is
  computed from then on is nonsense, which takes as long.

Each row is a process of its own. Slower: milliseconds of a decode step beside prompts over those of
one alone, before and after, means of all rounds; the bound is `--slowdown`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.native import NativeModel
from edgellm.backends.segments import ChunkBuffers
from edgellm.llm import LLM, load
from edgellm.store.sources import DEFAULT_MODEL

# Tokens of the prompts of streams.
SHORT = 24


def prompt(llm: LLM, seed: int, length: int) -> list[int]:
    vocabulary = llm.engine.config.vocab_size
    return [(31 * i + 977 * seed + 7) % vocabulary for i in range(length)]


def start(way: str, args: argparse.Namespace) -> LLM:
    """A model whose threads are where the row wants them."""
    cores = sorted(os.sched_getaffinity(0))
    common: dict[str, Any] = {"ctx_size": 4096, "cache_size": 32768, "threads": len(cores)}
    if way == "stall_free":
        return load(args.model, **common)
    os.sched_setaffinity(0, set(cores[1:]))  # for the threads of ONNX Runtime's pool
    llm = load(
        args.model,
        prefill="cpu",
        precision=args.precision,
        decode="native",
        schedule="out-of-order",
        scheduling="two_devices",
        decode_slowdown=args.slowdown,
        **common,
    )
    if way == "two_devices":
        pin_prompts(llm, set(cores[1:]))
        os.sched_setaffinity(0, {cores[0]})
    else:
        os.sched_setaffinity(0, set(cores))
        play_accelerator(llm, speed=float(way.split()[1]), threads=len(cores))
    return llm


def pin_prompts(llm: LLM, cores: set[int]) -> None:
    """Threads begin where the one is that starts them; that of prompts is moved."""
    backend = llm.engine.prefill
    run = backend.run

    def pinned(*spans: Any, **options: Any) -> Any:
        os.sched_setaffinity(0, cores)
        return run(*spans, **options)

    backend.run = pinned  # type: ignore[method-assign]


def play_accelerator(llm: LLM, *, speed: float, threads: int) -> None:
    """Sleep where graphs would run; decode has all cores, as beside another device."""
    prefill, decoder = llm.engine.prefill, llm.engine.decoder
    assert isinstance(prefill, ChunkedBackend)
    assert isinstance(decoder, NativeModel)
    decoder._threads = threads
    segments, costs = prefill.model.segments, prefill.costs.chunk
    buffers = segments.buffers

    def sleeping(chunk: int, *, slot: int = 0) -> ChunkBuffers:
        real = buffers(chunk, slot=slot)
        seconds = costs[chunk] / len(real.segments) / speed

        def sleep() -> None:
            time.sleep(seconds)

        return replace(real, segments=[sleep] * len(real.segments))

    segments.buffers = sleeping  # type: ignore[method-assign]
    prefill.costs = replace(
        prefill.costs, chunks={size: (cost / speed,) for size, cost in costs.items()}
    )


class Prompts:
    """One prompt after the other, in a thread, while it is on.

    Attributes:
        on: whether another one follows.
        idle: whether none is on its way.
    """

    def __init__(self, llm: LLM, length: int) -> None:
        self.on, self.idle, self._end = threading.Event(), True, False
        self._llm, self._length = llm, length
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        seed = 1000
        while not self._end:
            self.idle = True
            if self.on.wait(0.02):
                self.idle, seed = False, seed + 1
                tokens = prompt(self._llm, seed, self._length)
                self._llm.generate(tokens, max_tokens=1, ignore_eos=True)

    def close(self) -> None:
        self._end = True
        self._thread.join()


class Counted(NamedTuple):
    """What happened in so many seconds."""

    seconds: float
    decoded: int
    prefilled: int


def total(parts: Sequence[Counted]) -> Counted:
    return Counted(*(sum(values) for values in zip(*parts, strict=True)))


class Streams:
    """Answers that are read in turns, each a token at a time."""

    def __init__(self, llm: LLM, count: int) -> None:
        self._counts, self._stop = llm.engine.loop.counts, threading.Event()
        self._streams = [
            llm.stream(
                prompt(llm, i, SHORT), cancel=self._stop, ignore_eos=True, seed=i,
                repetition_limit=0, speculate=False,
            )
            for i in range(count)
        ]  # fmt: skip

    def decode(self, while_true: Callable[[float], bool]) -> Counted:
        counts, begin = self._counts, time.perf_counter()
        decoded, prefilled = counts.decode_rows, counts.prefill_rows
        while while_true(time.perf_counter() - begin):
            for stream in self._streams:
                next(stream)
        seconds = time.perf_counter() - begin
        return Counted(seconds, counts.decode_rows - decoded, counts.prefill_rows - prefilled)

    def close(self) -> None:
        self._stop.set()
        for stream in self._streams:
            list(stream)


def one_round(llm: LLM, prompts: Prompts, args: argparse.Namespace) -> tuple[Counted, Counted]:
    """Decode alone, and beside prompts. Streams begin anew, as steps grow with their positions;
    alone is before and after, so that both are as deep on average."""
    streams = Streams(llm, args.streams)
    streams.decode(lambda seconds: seconds < 0.5)
    before = streams.decode(lambda seconds: seconds < args.seconds / 2)
    prompts.on.set()
    beside = streams.decode(lambda seconds: seconds < args.seconds)
    prompts.on.clear()
    # what the last prompt owes is paid until it ends
    rest = streams.decode(lambda _: not prompts.idle)
    after = streams.decode(lambda seconds: seconds < args.seconds / 2)
    streams.close()
    return total([before, after]), total([beside, rest])


def work(way: str, args: argparse.Namespace) -> dict[str, float]:
    llm = start(way, args)
    prompts = Prompts(llm, args.length)
    rounds = [one_round(llm, prompts, args) for _ in range(args.rounds + 1)]
    prompts.close()
    # what takes how long is learnt in the first round
    alone, beside = (total(parts) for parts in zip(*rounds[1:], strict=True))
    return {
        "alone": 1e3 * args.streams * alone.seconds / alone.decoded,
        "beside": 1e3 * args.streams * beside.seconds / beside.decoded,
        "prompts": beside.prefilled / beside.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--precision", default="w8a8")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slowdown", type=float, default=1.1)
    parser.add_argument("--speeds", default="4,16")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work, args)))
        return
    ways = ["stall_free", "two_devices", *(f"two_devices, {s} x" for s in args.speeds.split(","))]
    print("| | a step alone, ms | beside prompts, ms | slower | prompts, tokens/s |")
    print("|---" * 5 + "|")
    for way in ways:
        command = [sys.executable, __file__, *sys.argv[1:], "--work", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        values = json.loads(done.stdout)
        slower = values["beside"] / values["alone"]
        print(
            f"| {way} | {values['alone']:.2f} | {values['beside']:.2f} | {slower:.2f} | "
            f"{values['prompts']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
