"""Gaps that move as someone types: filled with a session that keeps the suffix, and without one.

    python tests/bench/keystrokes.py MODEL [--tokens 3000]

At places of a program (`argparse.py`) its next characters are typed, four at a time, and the rest
of the line is asked for behind each. Printed are lines that are the same with and without a
session, how many of either are those of the program, and the median seconds to the first token.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from typing import Any

from edgellm.llm import LLM, load

PLACES, STROKES, TYPED = 6, 5, 4


def filled(llm: LLM, prefix: str, suffix: str, **session: Any) -> tuple[str, float]:
    """The rest of the line, and the seconds to its first token."""
    start = time.perf_counter()
    pieces = llm.stream_infill(prefix, suffix, single_line=True, max_tokens=24, **session)
    first, text = 0.0, ""
    for piece in pieces:
        first = first or time.perf_counter() - start
        text += piece.text
    return text.rstrip("\n"), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=3000, help="of the text around a gap")
    arguments = parser.parse_args()
    llm = load(arguments.model, ctx_size=2 * arguments.tokens)
    source = inspect.getsource(argparse)
    tokens = llm.tokenize(source[source.index("class HelpFormatter") :])
    code = llm.detokenize(tokens[: arguments.tokens])
    ways: dict[str, list[tuple[str, float]]] = {"plain": [], "session": []}
    wanted = []
    for number in range(PLACES):
        # in a line in the first half of the text, so that most of it is suffix
        begin = code.index("\n", round(len(code) * (number + 1) / (2 * PLACES + 2))) + 1
        while len(code[begin : code.index("\n", begin)].strip()) < PLACES * TYPED:
            begin = code.index("\n", begin) + 1
        end = code.index("\n", begin)
        begin = end - len(code[begin:end].lstrip())
        suffix = code[end:]
        with llm.session() as session:
            for way, given in (("plain", {}), ("session", {"session": session})):
                filled(llm, code[:begin], suffix, **given)
                for stroke in range(1, STROKES + 1):
                    at = begin + TYPED * stroke
                    ways[way].append(filled(llm, code[:at], suffix, **given))
                    if given:
                        wanted.append(code[at:end])
    plain, kept = ways["plain"], ways["session"]
    same = sum(a[0] == b[0] for a, b in zip(plain, kept, strict=True))
    print(f"{llm.name}: {arguments.tokens} tokens; {same} of {len(kept)} lines the same")
    for way, lines in ways.items():
        right = sum(line == other for (line, _), other in zip(lines, wanted, strict=True))
        seconds = statistics.median(first for _, first in lines)
        print(f"{way:8} {right:3} of {len(lines)} right, first token {1e3 * seconds:7.1f} ms")


if __name__ == "__main__":
    main()
