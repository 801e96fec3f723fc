"""Decode with drafts beside decode without, on texts of several kinds: tokens/s, and the same text.

    python tests/bench/drafts.py [MODEL] [--tokens 400] [--rounds 3] [--only edit,quotes]

Each question is answered with and without drafts in turns, greedily; the prompt is in the cache.
Ratios are medians of `--rounds`. Some minutes with a model of 0.5 B on two cores.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
from dataclasses import dataclass
from typing import Any

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


def questions() -> dict[str, str]:
    source = "\n".join(inspect.getsource(textwrap).splitlines()[:200])
    return {
        "edit": "Rename the attribute `width` of this file to `columns`, and write the whole file "
        f"again, with nothing else changed:\n\n```python\n{source}\n```",
        "quotes": f"{ARTICLE}\n\nSummarize this text, with each direct quote word for word.",
        "json": f"{RECORDS}\n\nWrite these orders as a JSON list of objects with the fields order, "
        "name, count, thing, price, city and date.",
        "chat": "What should I look at when I buy a used bicycle? Answer in ten points.",
        "prose": "Write a short story about a clockmaker who moves to the sea.",
    }


def rate(answer: Completion) -> float:
    return answer.stats.generation_tokens_per_second


@dataclass(frozen=True)
class Answers:
    """Answers to one question, with drafts and without, one after the other."""

    drafted: list[Completion]
    plain: list[Completion]

    def row(self, name: str) -> dict[str, Any]:
        stats = self.drafted[-1].stats
        pairs = zip(self.drafted, self.plain, strict=True)
        ratios = [rate(a) / rate(b) for a, b in pairs]
        return {
            "question": name,
            "tokens": len(self.plain[0].tokens),
            "drafted": stats.drafted_tokens,
            "right": stats.accepted_tokens,
            "tokens/s": round(statistics.median(rate(a) for a in self.drafted), 1),
            "without": round(statistics.median(rate(a) for a in self.plain), 1),
            "ratio": round(statistics.median(ratios), 2),
            "same": all(a.tokens == self.plain[0].tokens for a in (*self.drafted, *self.plain)),
        }


def answers(llm: LLM, question: str, *, tokens: int, rounds: int) -> Answers:
    found = Answers([], [])
    for _ in range(rounds):
        for speculate, kept in ((True, found.drafted), (False, found.plain)):
            chat = llm.chat(temperature=0, max_tokens=tokens, speculate=speculate)
            kept.append(chat.send(question))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(questions()))
    arguments = parser.parse_args()
    llm = load(arguments.model, ctx_size=8192)
    for name in arguments.only.split(","):
        found = answers(llm, questions()[name], tokens=arguments.tokens, rounds=arguments.rounds)
        print(json.dumps(found.row(name)), flush=True)


if __name__ == "__main__":
    main()
