"""What an answer does with the tokens of its session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inspection import context

from edgellm.llm import load

LONG = [1 + (7 * i) % 250 for i in range(600)]


class WatchedTokens(list[int]):
    """Counts how many elements are read one after the other, or copied."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        self.read += len(value) if isinstance(key, slice) else 1
        return value


@pytest.mark.parametrize("options", [{}, {"repeat_penalty": 1.1, "speculate": False}], ids=str)
def test_a_token_does_not_cost_all_tokens_before_it(
    tiny_model: Path, options: dict[str, Any]
) -> None:
    session = load(str(tiny_model)).session()
    session.append(LONG)
    read = []
    for count in (8, 40):
        session.rewind(len(LONG))
        context(session).tokens = watched = WatchedTokens(session.tokens)
        answer = session.generate(temperature=0, max_tokens=count, ignore_eos=True, **options)
        assert len(answer.tokens) == count
        read.append(watched.read)
    assert read[1] - read[0] < 10 * len(LONG)  # and not 32 times and more
