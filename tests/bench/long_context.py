"""Costs of a long context, and passkeys found in it, with each way to keep its KV cache smaller.

    python tests/bench/long_context.py [MODEL] [--length 4000]
        [--ways "kv_format=k4v4,kv_format=k4v4 kv_read=512,kv_budget=1024"]

A way is options of `edgellm.load`; the first one has none. Each has the same prompts:

* seconds to the first token behind `--length` tokens of the Python manual, once;
* MB that the KV cache holds for one sequence of `--length` tokens, and ms a token of an answer
  behind it: answers of `--tokens` tokens, turn and turn about, medians of `--rounds`;
* passkeys: a number among repeated sentences (Mohtashami and Jaggi, arXiv:2305.16300), in each of
  `--places` places as far apart, none at an end, asked for behind them, greedily.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pydoc_data.topics import topics

import numpy as np
from fidelity import options_of

from edgellm.llm import LLM, load
from edgellm.store.sources import DEFAULT_MODEL

WAYS = "kv_format=k8v4,kv_format=k4v4,kv_format=k4v4 kv_read=1024,kv_format=k4v4 kv_read=512"
WAYS += ",kv_budget=1024"
SENTENCES = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
KEY = "71432"
HIDDEN = f"The pass key is {KEY}. Remember it. {KEY} is the pass key. "
QUESTION = "\nWhat is the pass key? The pass key is"


def haystack(llm: LLM, length: int, place: float) -> list[int]:
    """Token ids of about `length` tokens of sentences with the key at `place` of them, 0 to 1."""
    encode = llm.engine.tokenizer.encode
    count = length // len(encode(SENTENCES, add_bos=False))
    before = round(place * count)
    return encode(SENTENCES * before + HIDDEN + SENTENCES * (count - before) + QUESTION)


def found(llm: LLM, length: int, places: int) -> int:
    """The number of places where the key is answered."""
    answers = [
        llm.generate(haystack(llm, length, place), max_tokens=8, temperature=0).text
        for place in np.linspace(0, 1, places + 2)[1:-1]
    ]
    return sum(KEY in answer for answer in answers)


def megabytes(llm: LLM) -> float:
    """MB that sequences hold of the KV cache."""
    groups = llm.engine.cache.groups
    return sum(g.pool.used * g.blocks.nbytes / g.blocks.count for g in groups) / 1e6


def costs(llms: list[LLM], arguments: argparse.Namespace) -> list[tuple[float, float, float]]:
    """Seconds to the first token, MB and ms a token of each, behind the same prompt."""
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = llms[0].engine.tokenizer.encode(text)[: arguments.length]
    first = []
    with ExitStack() as stack:
        sessions = [stack.enter_context(llm.session()) for llm in llms]
        for session in sessions:
            session.append(tokens)
            start = time.perf_counter()
            session.generate(max_tokens=1, ignore_eos=True)
            first.append(time.perf_counter() - start)
        held = [megabytes(llm) for llm in llms]
        times: list[list[float]] = [[] for _ in llms]
        for turn in range(arguments.rounds):
            order = range(len(llms)) if turn % 2 else reversed(range(len(llms)))
            for i in order:
                start = time.perf_counter()
                sessions[i].generate(max_tokens=arguments.tokens, ignore_eos=True, speculate=False)
                times[i].append((time.perf_counter() - start) / arguments.tokens)
        medians = [1e3 * statistics.median(each) for each in times]
        return list(zip(first, held, medians, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--ways", default=WAYS, help="options, with commas between ways")
    parser.add_argument("--length", type=int, default=4000, help="tokens of the context")
    parser.add_argument("--tokens", type=int, default=32, help="of a timed answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--places", type=int, default=7, help="of the passkey; 0: none")
    arguments = parser.parse_args()
    ways = ["", *arguments.ways.split(",")]
    room = arguments.length + (arguments.rounds + 1) * arguments.tokens + 256
    with ExitStack() as stack:
        llms = [
            stack.enter_context(load(arguments.model, ctx_size=room, **options_of(way.split())))
            for way in ways
        ]
        spent = costs(llms, arguments)
        print(
            "| | s to the first | MB | ms a token | passkeys |\n|---|---|---|---|---|", flush=True
        )
        for way, llm, (s, mb, ms) in zip(ways, llms, spent, strict=True):
            hits = found(llm, arguments.length, arguments.places)
            row = f"| {way or 'int8'} | {s:.2f} | {mb:.1f} | {ms:.2f} "
            print(f"{row}| {hits} of {arguments.places} |")


if __name__ == "__main__":
    main()
