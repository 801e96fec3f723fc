"""Condensed contexts beside the whole one: what is remembered, memory, speed.

    python tests/bench/condensed.py [MODEL] [--tokens 3000] [--keep 0.5,0.3,0.2] [--texts 2]

A document of prose, and one of code, has twelve facts in it that are told once. It is computed and
condensed, with no question known. Against the whole context in the same cache: KL divergence and
the same top token over the 256 tokens of the document that follow, and of the answer to a question
about each fact the negative log-likelihood and whether greedy decoding gives it. `no fact` is a
context without the facts. Then seconds to condense over those of the prompt, MB of the KV cache,
and milliseconds a token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import numpy as np

from edgellm.engine.one_sequence import compute_tokens
from edgellm.generation_options import GenerationOptions
from edgellm.llm import LLM, load
from edgellm.session import Session
from edgellm.store.sources import DEFAULT_MODEL

FACTS, BEHIND, DECODED = 12, 256, 48
OPTIONS = GenerationOptions(temperature=0, ignore_eos=True, speculate=False)
BEGIN = "<|im_start|>user\nRead this document.\n\n"
ASK = "\n\nWhat is the {thing}?<|im_end|>\n<|im_start|>assistant\nThe {thing} is"
PLACES = (
    *("Ostrava", "Lisbon", "Tampere", "Gdansk", "Bergen", "Porto"),
    *("Zagreb", "Lyon", "Utrecht", "Malmo", "Graz", "Leeds"),
)
OWNERS = ["library", "museum", "harbour", "theatre", "hospital", "archive"]
NAMES = (
    *("Helena Brandt", "Marcus Oye", "Sofia Lind"),
    *("Peter Novak", "Amina Rahman", "Diego Fuentes"),
)


@dataclass(frozen=True)
class Document:
    """Token ids of a context and of what follows it, and questions with their answers."""

    tokens: list[int]
    plain: list[int]  # without the facts
    behind: list[int]
    questions: list[tuple[list[int], list[int]]]


def facts(chance: random.Random) -> list[tuple[str, str]]:
    """Pairs of a thing and what it is: numbers and names."""
    told = []
    for i, place in enumerate(chance.sample(PLACES, FACTS)):
        kind, value = "password", str(chance.randrange(10000, 99999))
        if i % 3 == 2:
            kind, value = "director", NAMES[i // 3]
        told.append((f"{kind} of the {chance.choice(OWNERS)} in {place}", value))
    return told


def document(llm: LLM, kind: str, seed: int, length: int) -> Document:
    chance = random.Random(seed)
    text = (
        Path(argparse.__file__).read_text()
        if kind == "code"
        else "\n\n".join(
            topics.topics[name] for name in ("typesseq", "objects", "exceptions", "debugger")
        )
    )
    lines = [llm.tokenize(line + "\n") for line in text.split("\n")]
    lines = lines[chance.randrange(len(lines) // 4) :]
    told, mark = facts(chance), "# " if kind == "code" else ""
    tokens, plain = (llm.tokenize(BEGIN, parse_special=True) for _ in range(2))
    count = 0
    while len(tokens) < length:
        share = (count + 0.5) / FACTS
        if count < FACTS and len(tokens) > length * share:
            thing, value = told[count]
            tokens += llm.tokenize(f"\n{mark}The {thing} is {value}.\n")
            count += 1
        line = lines.pop(0)
        tokens += line
        plain += line
    questions = [
        (llm.tokenize(ASK.format(thing=thing), parse_special=True), llm.tokenize(f" {value}"))
        for thing, value in told[:count]
    ]
    return Document(tokens, plain, [t for line in lines for t in line][:BEHIND], questions)


def behind(session: Session, tokens: list[int]) -> np.ndarray:
    """Log-probabilities after each of some tokens behind a session, `[n, V]`."""

    def compute() -> np.ndarray:
        sequence = session._context.sequence.fork()
        try:
            return compute_tokens(session._engine.prefill, tokens, sequence)
        finally:
            sequence.close()

    rows = session._engine.thread.call(compute).astype(np.float64)
    return rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)


def answers(session: Session, questions: list[tuple[list[int], list[int]]]) -> tuple[float, int]:
    """Mean negative log-likelihood of the right answers, and how many greedy decoding gives."""
    losses, right = [], 0
    for question, answer in questions:
        rows = behind(session, [*question, *answer])[len(question) - 1 : -1]
        losses.append(-rows[np.arange(len(answer)), answer].mean())
        right += bool((rows.argmax(axis=1) == answer).all())
    return statistics.fmean(losses), right


def megabytes(llm: LLM) -> float:
    groups = llm.engine.cache.groups
    return sum(g.pool.used * g.blocks.nbytes / g.blocks.count for g in groups) / 1e6


def pace(session: Session) -> float:
    """Milliseconds a token of an answer."""
    with session.fork() as fork:
        stats = fork.generate(
            max_tokens=DECODED, ignore_eos=True, temperature=0, speculate=False
        ).stats
    return 1e3 / stats.generation_tokens_per_second


def measure(model: str, kind: str, seed: int, *, length: int, keeps: list[float | None]) -> None:
    """Print a line of the table for each share that is kept."""
    expected: np.ndarray | None = None
    for keep in keeps:
        with load(model, ctx_size=length + 1100) as llm, llm.session() as session:
            given = document(llm, kind, seed, length)
            session.append(given.tokens)
            begin = time.perf_counter()
            session.generate(max_tokens=0)
            prompt_s = time.perf_counter() - begin
            cost = ""
            if keep is not None:
                begin = time.perf_counter()
                session.condense(keep)
                cost = f"{(time.perf_counter() - begin) / prompt_s:.2f}"
            size, rows = megabytes(llm), behind(session, given.behind)
            expected = rows if expected is None else expected
            kl = (np.exp(expected) * (expected - rows)).sum(axis=1).mean()
            same = (rows.argmax(axis=1) == expected.argmax(axis=1)).mean()
            loss, right = answers(session, given.questions)
            name = "whole" if keep is None else f"{keep:g}"
            print(
                f"| {kind} {seed} | {name} | {kl:.4f} | {same:.1%} | {loss:.3f} | {right} of "
                f"{len(given.questions)} | {cost} | {size:.1f} | {pace(session):.2f} |",
                flush=True,
            )
    with load(model, ctx_size=length + 1100) as llm, llm.session() as session:
        session.append(document(llm, kind, seed, length).plain)
        session.generate(max_tokens=0)
        loss, right = answers(session, given.questions)
        print(f"| {kind} {seed} | no fact | | | {loss:.3f} | {right} | | | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--keep", default="0.5,0.3,0.2")
    parser.add_argument("--texts", type=int, default=2, help="of each kind")
    arguments = parser.parse_args()
    head = "text|keep|KL divergence|same top token|answers' loss|right|condensing / prompt|MB|ms"
    print(f"| {head.replace('|', ' | ')} |\n{'|---' * 9}|")
    keeps = [None, *map(float, arguments.keep.split(","))]
    for kind in ("prose", "code"):
        for seed in range(arguments.texts):
            measure(arguments.model, kind, seed, length=arguments.tokens, keeps=keeps)


if __name__ == "__main__":
    main()
