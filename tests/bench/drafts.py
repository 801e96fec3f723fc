"""Decode with each kind of drafts beside decode without, on texts of several kinds.

    python tests/bench/drafts.py [MODEL] [--draft MODEL] [--tokens 400] [--rounds 3]
                                 [--only edit,quotes] [--together 2]

A line for each workload and drafter: right and drafted tokens, tokens a step, tokens/s, and whether
all answers were the same tokens. Each question is answered greedily by all drafters in turns, so
that they share the machine's moods; the prompt is in the cache. Ratios are medians of `--rounds`.
The table knows nothing at first but, for `repeat`, `again` and `code again`, an earlier answer of
another chat: to the same question, to it in other words, and to one for nearly the same code.
`--together` asks each question that many times at once. Minutes with a model of 0.5 B on two cores.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from edgellm.engine.prompt_lookup import TokenTable
from edgellm.llm import LLM, load
from edgellm.results import Completion
from edgellm.store.sources import DEFAULT_MODEL

ARTICLE = (
    "The lighthouse at Cape Arden was built in 1871, after two ships had been lost in a single "
    "winter. Its lamp burned whale oil at first, then paraffin, and from 1926 on electricity from "
    "a small turbine in the stream behind the keeper's house. \"We could read the newspaper by it "
    'from a mile out," said Maren Holt, whose grandfather fished these waters. The last keeper, '
    'Tomas Reed, left in 1984, when the light was automated. "I wound the clockwork every four '
    'hours for thirty years," he wrote in a letter to the harbour board, "and I would not have '
    'missed one night of it." Since 2009 the tower belongs to a trust of nine families, who '
    "repaint it every third summer and let two rooms to visitors. Last year 1,412 people climbed "
    "its 131 steps."
)
RECORDS = "\n".join(
    f"Order {1040 + i}: {name} bought {2 + i % 5} {thing} at {3 + 4 * i}.50 euros each, to be "
    f"delivered to {city} by {12 + i} March."
    for i, (name, thing, city) in enumerate(
        zip(
            ("Ada Pahl", "Ben Okoro", "Cleo Marsh", "Dan Ito", "Eva Lindt", "Finn Soto"),
            ("lamps", "chairs", "rugs", "shelves", "clocks", "vases"),
            ("Bremen", "Lyon", "Turku", "Porto", "Graz", "Split"),
            strict=True,
        )
    )
)
BICYCLE = "What should I look at when I buy a used bicycle? Answer in ten points."
QUEUE = (
    "Write a Python class for a bounded priority queue with push, pop and peek, with docstrings "
    "and unit tests."
)
# Questions that were answered in another chat before, by those that follow them.
EARLIER = {"repeat": BICYCLE, "again": BICYCLE, "code again": QUEUE}


def questions() -> dict[str, str]:
    source = "\n".join(inspect.getsource(textwrap).splitlines()[:200])
    return {
        "edit": "Rename the attribute `width` of this file to `columns`, and write the whole file "
        f"again, with nothing else changed:\n\n```python\n{source}\n```",
        "quotes": f"{ARTICLE}\n\nSummarize this text, with each direct quote word for word.",
        "json": f"{RECORDS}\n\nWrite these orders as a JSON list of objects with the fields order, "
        "name, count, thing, price, city and date.",
        "code": QUEUE,
        "code again": "I need a bounded priority queue in Python: a class with push, pop, peek and "
        "len. Add type hints and docstrings.",
        "chat": BICYCLE,
        "repeat": BICYCLE,
        "again": "I want to buy a used bicycle. Give me ten points that I should look at.",
        "prose": "Write a short story about a clockmaker who moves to the sea.",
    }


@dataclass(frozen=True)
class Round:
    """Answers to one question at once, and the seconds that all of them took."""

    answers: Sequence[Completion]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens/s of decode; of several answers, with their prompts."""
        if len(self.answers) == 1:
            return self.answers[0].stats.generation_tokens_per_second
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


@dataclass(frozen=True)
class Rounds:
    """Rounds of one question with one drafter."""

    rounds: list[Round] = field(default_factory=list)

    def row(self, name: str, drafter: str, plain: Rounds) -> dict[str, Any]:
        answers = [answer for each in self.rounds for answer in each.answers]
        expected = plain.rounds[0].answers[0].tokens
        stats = [answer.stats for answer in answers]
        tokens = sum(len(answer.tokens) for answer in answers)
        right = sum(each.accepted_tokens for each in stats)
        pairs = zip(self.rounds, plain.rounds, strict=True)
        return {
            "question": name,
            "drafter": drafter,
            "tokens": len(expected),
            "right": {
                by: f"{sum(each.drafts[by].accepted for each in stats if by in each.drafts)} of "
                f"{sum(each.drafts[by].drafted for each in stats if by in each.drafts)}"
                for by in sorted({by for each in stats for by in each.drafts})
            },
            "tokens/step": round(tokens / (tokens - right), 2),
            "tokens/s": round(statistics.median(each.rate for each in self.rounds), 1),
            "ratio": round(statistics.median(a.rate / b.rate for a, b in pairs), 2),
            "same": all(answer.tokens == expected for answer in answers),
        }


def ask(llm: LLM, question: str, *, tokens: int, speculate: bool, together: int) -> Round:
    def answer(_: int) -> Completion:
        return llm.chat(temperature=0, max_tokens=tokens, speculate=speculate).send(question)

    start = time.perf_counter()
    with ThreadPoolExecutor(together) as pool:
        answers = list(pool.map(answer, range(together)))
    return Round(answers, time.perf_counter() - start)


def measure(
    llm: LLM, drafters: Sequence[str], name: str, *, tokens: int, rounds: int, together: int
) -> Mapping[str, Rounds]:
    question, earlier = questions()[name], EARLIER.get(name)
    model = llm.engine.draft_model
    found = {drafter: Rounds() for drafter in drafters}
    ask(llm, question, tokens=1, speculate=False, together=together)  # the prompt
    for _ in range(rounds):
        for drafter, kept in found.items():
            llm.engine.draft_model = model if "model" in drafter else None
            llm.engine.token_table = TokenTable() if "table" in drafter else None
            if earlier is not None and "table" in drafter:
                ask(llm, earlier, tokens=tokens, speculate=True, together=1)
            speculate = drafter != "none"
            kept.rounds.append(
                ask(llm, question, tokens=tokens, speculate=speculate, together=together)
            )
    llm.engine.draft_model = model
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--draft")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--only", default=",".join(questions()))
    given = parser.parse_args()
    llm = load(given.model, ctx_size=8192, draft=given.draft, draft_tokens=given.draft_tokens)
    drafters = ["none", "lookup", "lookup, table", *(["lookup, model"] if given.draft else [])]
    for name in given.only.split(","):
        found = measure(
            llm,
            drafters,
            name,
            tokens=given.tokens,
            rounds=given.rounds,
            together=given.together,
        )
        for drafter, rounds in found.items():
            print(json.dumps(rounds.row(name, drafter, found["none"])), flush=True)


if __name__ == "__main__":
    main()
