"""An outline whose points are written together, beside one long answer to the same question.

    python tests/bench/outline.py [MODEL]

Seconds and tokens of both, and how many times sooner the outline is there, for each token. Long
answers may be as long as the outline with all its points.
"""

from __future__ import annotations

import argparse
import statistics
import time

from edgellm import GenerationOptions
from edgellm.llm import load
from edgellm.store.sources import DEFAULT_MODEL

QUESTIONS = (
    "What are the advantages of static typing?",
    "How should a team prepare a software release?",
    "What makes a web page slow, and what helps?",
    "What should a beginner know about databases?",
)
OPTIONS = GenerationOptions(temperature=0, max_tokens=240, speculate=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    llm = load(arguments.model, threads=arguments.threads, ctx_size=4096, cache_size=16384)
    llm.generate("warm up", options=OPTIONS, max_tokens=8)
    ratios = []
    for question in QUESTIONS:
        start = time.perf_counter()
        outline = llm.outline(question, options=OPTIONS)
        outlined = time.perf_counter() - start
        points = [len(point.completion.tokens) for point in outline.points]
        count = len(outline.skeleton.tokens) + sum(points)
        with llm.chat() as chat:
            start = time.perf_counter()
            answer = chat.send(question, options=OPTIONS, max_tokens=count)
            alone = time.perf_counter() - start
        per_token = (alone / len(answer.tokens)) / (outlined / count)
        ratios.append(per_token)
        print(
            f"{question} {len(points)} points, {count} tokens in {outlined:.2f} s; one answer: "
            f"{len(answer.tokens)} tokens in {alone:.2f} s; {per_token:.2f} times as fast"
        )
        print(f"    {outline.text!r:.300}")
    print(f"median: {statistics.median(ratios):.2f} times as many tokens in a second")


if __name__ == "__main__":
    main()
