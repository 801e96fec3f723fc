"""Penalties of repetitions, against a search that compares every place with the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm import GenerationOptions
from edgellm.engine.samplers import Dry, Repetitions

TEXTS = ["a", "b", "c", "d", "\n", "x:", ":y", "<", "-", "<<", "->", ">"]


class Words:
    """A tokenizer of a few words."""

    def bytes_of(self, token: int) -> bytes:
        return TEXTS[token].encode()

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [TEXTS.index(letter) for letter in text]


def ids(text: str) -> list[int]:
    return [TEXTS.index(word) for word in text.split(" ")]


def penalties(text: str, **options: object) -> dict[str, float]:
    chosen = GenerationOptions(
        **{"dry_multiplier": 1.0, "dry_base": 2.0, "dry_sequence_breakers": [], **options}
    )
    found = Dry(chosen, Words()).penalties(ids(text))
    return {TEXTS[token]: penalty for token, penalty in found.items()}


def compared(tokens: list[int], limit: int, least: int) -> dict[int, int]:
    """What follows each earlier place, with the length of what stands there and at the end."""
    found: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and length < limit and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length >= least:
            found[tokens[end + 1]] = max(length, found.get(tokens[end + 1], 0))
    return found


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    limit=st.integers(0, 12),
    least=st.integers(0, 4),
)
def test_repetitions_are_found_as_by_comparing_all_places(
    tokens: list[int], limit: int, least: int
) -> None:
    found = Repetitions(12).before(tokens, len(tokens), limit=limit, least=least)
    assert found == compared(tokens, limit, least)


@given(
    tokens=st.lists(st.integers(0, 2), min_size=2, max_size=40),
    known=st.integers(1, 40),
    window=st.integers(1, 40),
)
def test_a_text_that_grows_or_changes(tokens: list[int], known: int, window: int) -> None:
    """Kept up token by token, also behind tokens that were taken back, and in a window."""
    kept = Repetitions(7)
    for end in [*range(1, known), *range(max(1, len(tokens) - 3), len(tokens) + 1)]:
        text = tokens[:end]
        count = min(window, len(text))
        found = kept.before(text, count, limit=7, least=1)
        assert found == compared(text[len(text) - count :], 7, 1)


def test_longer_repetitions_have_larger_penalties() -> None:
    assert penalties("a b c d a b") == {"c": 1.0}
    assert penalties("a b c d a b c") == {"d": 2.0}
    assert penalties("d c a b d b c a b") == {"d": 2.0 ** (3 - 2)}
    assert penalties("a b c b b") == {}  # one token is no repetition yet
    assert penalties("a b c b b", dry_allowed_length=1) == {"c": 1.0, "b": 1.0}


def test_only_the_last_tokens_count() -> None:
    assert penalties("a b c d a b", dry_penalty_last_n=6) == {"c": 1.0}
    assert penalties("a b c d a b", dry_penalty_last_n=5) == {}
    assert penalties("a b c d a b", dry_penalty_last_n=0) == {}


@pytest.mark.parametrize(
    ("breakers", "text", "expected"),
    [
        (["\n"], "a b \n c a b \n", {}),  # the repetition begins anew
        (["\n"], "\n a b c \n a b", {"c": 1.0}),
        (["\n"], "a b \n d a b", {}),  # a breaker itself is never penalized
        ([":"], "x: a b c x: a b", {"c": 1.0}),
        (["a"], "d a b c d a b", {}),
        (["<-"], "d < - b c d < - b", {}),  # made of two tokens
        (["<-"], "d < a b c d < a b", {"c": 4.0}),
        (["<->"], "d << -> b c d << -> b", {"c": 4.0}),  # `->` is no token of the tail as encoded
    ],
)
def test_breakers(breakers: list[str], text: str, expected: dict[str, float]) -> None:
    assert penalties(text, dry_sequence_breakers=breakers) == expected


def test_penalties_stay_finite() -> None:
    same = " ".join(["a"] * 5000)
    (penalty,) = penalties(same, dry_base=50.0, dry_multiplier=100.0).values()
    assert 1e29 < np.float32(penalty) < np.inf
    assert penalties(same, dry_base=1.0) == {"a": 1.0}
