"""Contexts composed of documents that were computed alone, beside the plain context.

    python tests/bench/compose.py [MODEL]

Four documents of about 1,000 tokens and questions about them: KL divergence of the next tokens to
those of the plain context along its greedy answer, how often the most likely token is the same,
tokens copied and computed, and seconds to the first token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pydoc_data import topics

import numpy as np
from numpy.typing import NDArray

from edgellm import GenerationOptions
from edgellm.llm import LLM, load
from edgellm.session import Session
from edgellm.store.sources import DEFAULT_MODEL

DOCUMENTS, LENGTH, ANSWER = ("typesseq", "import", "with", "strings"), 1000, 24
QUESTIONS = (
    "How is a with statement executed?",
    "What does a relative import start with?",
    "What is the difference between a list and a tuple?",
    "What is a raw string literal?",
)
OPTIONS = GenerationOptions(temperature=0, repeat_penalty=1.0, ignore_eos=True, speculate=False)
Distributions = list[NDArray[np.float64]]


def parts_of(llm: LLM, question: str) -> list[str]:
    texts = [llm.detokenize(llm.tokenize(topics.topics[n])[:LENGTH]) for n in DOCUMENTS]
    start = "<|im_start|>system\nAnswer questions about these documents.<|im_end|>\n"
    end = f"\n\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n"
    return [start + "<|im_start|>user\n", *(f"{text}\n\n" for text in texts), end]


def answered(session: Session, forced: Sequence[int] = ()) -> tuple[list[int], Distributions]:
    """Greedy tokens, or those that are forced, and the logarithm of each place's probabilities."""
    seen: Distributions = []

    def keep(scores: NDArray[np.float32], tokens: Sequence[int]) -> None:
        shifted = scores.astype(np.float64) - scores.max()
        seen.append(shifted - np.log(np.exp(shifted).sum()))
        if forced:
            scores[np.arange(len(scores)) != forced[len(tokens)]] = -np.inf

    with session.fork() as fork:
        answer = fork.generate(options=OPTIONS, max_tokens=ANSWER, logit_filter=keep)
    return list(answer.tokens), seen


def first_token(llm: LLM, parts: Sequence[str], recompute: float) -> tuple[Session, float]:
    """The session, and the seconds until its first token."""
    start = time.perf_counter()
    session = llm.compose(parts, recompute=recompute, parse_special=True)
    with session.fork() as fork:
        fork.generate(options=OPTIONS, max_tokens=1)
        return session, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    model = parser.parse_args().model
    plain, llm = load(model, ctx_size=6144), load(model, ctx_size=6144)
    parts = {question: parts_of(plain, question) for question in QUESTIONS}
    plain.generate("Hello", max_tokens=1)  # weights are read, and are not part of the time
    cold_session, cold = first_token(plain, parts[QUESTIONS[0]], 1)
    expected = {q: answered(first_token(plain, parts[q], 1)[0]) for q in QUESTIONS}
    llm.compose(parts[QUESTIONS[0]], recompute=0, parse_special=True).close()
    print(f"{llm.name}: plain context of {len(cold_session.tokens)} tokens, {cold:.2f} s")
    print("recompute   KL      same   copied  computed  first token   sooner")
    for recompute in (0.0, 0.02, 0.05, 0.15, 0.3):
        seconds, divergences, same = [], [], []
        for question, (tokens, before) in expected.items():
            session, taken = first_token(llm, parts[question], recompute)
            seconds.append(taken)
            _, after = answered(session, tokens)
            for p, q in zip(before, after, strict=True):
                divergences.append(float((np.exp(p) * (p - q)).sum()))
                same.append(bool(p.argmax() == q.argmax()))
            counts = session.composed
            session.close()
        assert counts is not None
        middle = statistics.median(seconds)
        print(
            f"{recompute:9.2f} {np.mean(divergences):7.4f} {np.mean(same):7.1%} "
            f"{counts.copied_tokens:8} {counts.computed_tokens:9} {middle:10.2f} s"
            f" {cold / middle:7.1f}x"
        )


if __name__ == "__main__":
    main()
