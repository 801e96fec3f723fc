"""Decode rows that ride in the chunks of prompts, against chunks of their own in turns with them.

    python tests/bench/riding.py [MODEL] [--prefill cpu] [--precision w8a8] [--streams 8,16]
                                 [--prompts 2] [--length 300] [--rounds 2]

Some streams decode while prompts are prefilled, on the same model and provider. Riding: rows of all
are one batch, laid one behind the other (`decode` chunked). In turns: each step runs a batch of
what decodes, and then one of prompts. Both in turns with each other, medians of `--rounds`; a
minute or two with the default model on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from dataclasses import dataclass

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.engine.engine import Engine
from edgellm.engine.loop import Loop
from edgellm.generation_options import GenerationArguments
from edgellm.llm import LLM, load
from edgellm.store.sources import DEFAULT_MODEL

WAYS = ("riding", "in turns")
# Tokens of the prompts of streams.
SHORT = 24


@dataclass(frozen=True)
class Rates:
    """Tokens per second while prompts were prefilled, and seconds of a step."""

    decoded: float
    prefilled: float
    step: float


def prompt(llm: LLM, seed: int, length: int) -> list[int]:
    vocabulary = llm.engine.config.vocab_size
    return [(31 * i + 977 * seed + 7) % vocabulary for i in range(length)]


def loops(engine: Engine) -> dict[str, Loop]:
    """A loop for each way; in turns, what decodes is another back end, on the same model."""
    prefill = engine.prefill
    assert isinstance(prefill, ChunkedBackend)
    policy = engine.selection.policy
    decoder = ChunkedBackend(prefill.model, prefill.host, prefill.costs, policy=policy)
    thread, cache, options = engine.thread, engine.cache, engine.options
    return {
        "riding": Loop(thread, cache, options, prefill=prefill, decoder=prefill),
        "in turns": Loop(thread, cache, options, prefill=prefill, decoder=decoder),
    }


def rates(llm: LLM, streams: int, args: argparse.Namespace, *, first: int) -> Rates:
    """From when all streams have their first token to when all prompts are prefilled."""
    options: GenerationArguments = {"max_tokens": 500, "ignore_eos": True, "seed": 1}
    stop = threading.Event()
    running = [
        llm.stream(prompt(llm, first + i, SHORT), cancel=stop, **options) for i in range(streams)
    ]
    for stream in running:
        next(stream)
    seeds = range(first + 1000, first + 1000 + args.prompts)
    prompts = [prompt(llm, seed, args.length) for seed in seeds]
    counts = llm.engine.loop.counts
    steps, decoded, prefilled = counts.steps, counts.decode_rows, counts.prefill_rows
    start = time.perf_counter()
    for answer in llm.batch(prompts, max_tokens=1, ignore_eos=True, seed=1):
        answer.result()
    seconds = time.perf_counter() - start
    stop.set()
    for stream in running:
        list(stream)
    return Rates(
        (counts.decode_rows - decoded) / seconds,
        (counts.prefill_rows - prefilled) / seconds,
        seconds / (counts.steps - steps),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--prefill", default="cpu")
    parser.add_argument("--precision")
    parser.add_argument("--streams", default="8")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    llm = load(
        args.model, prefill=args.prefill, precision=args.precision, decode="chunked",
        ctx_size=1024, cache_size=32768,
    )  # fmt: skip
    ways = loops(llm.engine)
    print(f"{llm.prefill}, {llm.threads} threads, {args.prompts} prompts of {args.length} tokens")
    print("| streams | | decoded t/s | prompts t/s | a step, ms |\n|---|---|---|---|---|")
    for streams in map(int, args.streams.split(",")):
        found: dict[str, list[Rates]] = {way: [] for way in WAYS}
        for turn in range(args.rounds + 1):
            for way in WAYS:
                llm.engine.loop = ways[way]
                llm.engine.thread.attach(ways[way])
                first = 10_000 * streams + 100 * turn + 50 * WAYS.index(way)
                found[way].append(rates(llm, streams, args, first=first))
        for way in WAYS:
            counted = found[way][1:]  # costs of steps are learnt in the first
            medians = [
                statistics.median(values)
                for values in zip(
                    *((each.decoded, each.prefilled, 1e3 * each.step) for each in counted),
                    strict=True,
                )
            ]
            print(f"| {streams} | {way} | {' | '.join(f'{m:.0f}' for m in medians)} |", flush=True)


if __name__ == "__main__":
    main()
