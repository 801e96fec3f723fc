"""A text that is changed near its beginning: its end copied, beside its end computed again.

    python tests/bench/edits.py [MODEL] [--place 0.1]

A text of about 4,000 tokens is in the KV cache; a sentence is put into it at `--place`, and
questions follow it: KL divergence of the next tokens to those of the plain context along its greedy
answer, how often the most likely token is the same, tokens copied, and seconds to the first token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pydoc_data import topics

import numpy as np
from compose import DOCUMENTS, LENGTH, OPTIONS, QUESTIONS, answered

from edgellm.llm import LLM, load
from edgellm.session import Session
from edgellm.store.sources import DEFAULT_MODEL

BEGIN = "<|im_start|>system\nAnswer questions about a text.<|im_end|>\n<|im_start|>user\n"
SENTENCE = " (The author of this part is Ada Lovelace, who wrote it in London in the year 1843.) "
END = "\n\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n"
WHO = "Who wrote the first part of the text, and in which year?"


def first_token(session: Session, tokens: Sequence[int], end: str, recompute: float) -> float:
    """Seconds from a change to the first token of an answer behind it and a question."""
    start = time.perf_counter()
    session.replace(tokens, recompute=recompute)
    session.append(end, parse_special=True)
    with session.fork() as fork:
        fork.generate(options=OPTIONS, max_tokens=1)
        return time.perf_counter() - start


def computed(llm: LLM, tokens: Sequence[int]) -> Session:
    session = llm.session()
    session.append(tokens)
    session.generate(max_tokens=0)
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--place", type=float, default=0.1, help="share of the text before it")
    arguments = parser.parse_args()
    plain, llm = (load(arguments.model, ctx_size=6144) for _ in range(2))
    begin = llm.tokenize(BEGIN, parse_special=True)
    text = [token for name in DOCUMENTS for token in llm.tokenize(topics.topics[name])[:LENGTH]]
    place = round(arguments.place * len(text))
    before = [*begin, *text]
    after = [*begin, *text[:place], *llm.tokenize(SENTENCE), *text[place:]]
    expected = {}
    for question in (*QUESTIONS, WHO):
        with computed(plain, after) as session:
            session.append(END.format(question=question), parse_special=True)
            expected[question] = answered(session)
    print(f"{llm.name}: {len(before)} tokens, a sentence behind {len(begin) + place}")
    print("recompute   KL      same   copied  first token   sooner")
    whole = 0.0
    for recompute in (1.0, 0.0, 0.05, 0.15):
        seconds, divergences, same, copied = [], [], [], 0
        for question, (tokens, one) in expected.items():
            # a cache of its own, in which no other text begins as this one does
            with load(arguments.model, ctx_size=6144) as fresh, computed(fresh, before) as session:
                end = END.format(question=question)
                seconds.append(first_token(session, after, end, recompute))
                if session.composed is not None:
                    copied = session.composed.copied_tokens
                _, other = answered(session, tokens)
            for p, q in zip(one, other, strict=True):
                divergences.append(float((np.exp(p) * (p - q)).sum()))
                same.append(bool(p.argmax() == q.argmax()))
        middle = statistics.median(seconds)
        whole = whole or middle
        print(
            f"{recompute:9.2f} {np.mean(divergences):7.4f} {np.mean(same):7.1%} {copied:8} "
            f"{middle:10.2f} s {whole / middle:7.1f}x"
        )
    print(f"{WHO} {llm.detokenize(expected[WHO][0])!r}")


if __name__ == "__main__":
    main()
