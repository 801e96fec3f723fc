"""Drafts from all answers of a loaded model: the tokens that followed the last ones before.

llama.cpp's ngram-mod, with a check of each entry in the place of very long drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.engine.draft_policy import Evidence, Kind

# Number of last tokens that name an entry. 16 find less of code that is written again, and of the
# drafts of 8 fewer are right (117 of 293, of 12 92 of 145).
_GRAM = 12
# 16 MiB: the token and the check of an entry have 4 bytes each.
_SLOTS = 1 << 21
_KIND = Kind("table", 0.7, most=63)
# Drafts in a row with a smaller share of right tokens than this, after which all is forgotten.
_BAD, _RIGHT = 5, 0.25


class TokenTable:
    """The token that followed each sequence of 12 tokens last, of all answers of a loaded model."""

    def __init__(self) -> None:
        self._tokens = np.zeros(_SLOTS, np.int32)  # and 1: memory that is all 0 is not touched
        self._checks = np.zeros(_SLOTS, np.int32)
        self._bad = 0

    def add(self, key: int, token: int) -> None:
        """Note the token behind a key, over what shares its place."""
        place, check = _place(key)
        self._tokens[place], self._checks[place] = token + 1, check

    def find(self, key: int) -> int | None:
        """Return the token behind a key; None: it is not known."""
        place, check = _place(key)
        token = int(self._tokens[place])
        return token - 1 if token and self._checks[place] == check else None

    def judge(self, *, drafted: int, accepted: int) -> None:
        """Note how much of a draft was right; after some bad ones all is forgotten."""
        self._bad = self._bad + 1 if accepted < _RIGHT * drafted else 0
        if self._bad == _BAD:
            self._tokens.fill(0)
            self._bad = 0


class TableDrafter:
    """Drafter of one answer, which adds its tokens to the table as well.

    Args:
        root: beginning of all keys; only answers with the same one find each other's tokens.
    """

    name = "table"

    def __init__(self, table: TokenTable, *, root: bytes) -> None:
        self._table = table
        self._root = root
        self._seen = 0
        self._draft: list[int] = []

    def evidence(self, tokens: Sequence[int]) -> Evidence | None:
        """See `Drafter`."""
        if len(tokens) < self._seen:  # a full context has forgotten some
            self._seen, self._draft = 0, []
        self._judge(tokens[self._seen :])
        for end in range(max(self._seen, _GRAM), len(tokens)):
            self._table.add(self._key(tokens[end - _GRAM : end]), tokens[end])
        self._seen = len(tokens)
        known = len(tokens) >= _GRAM and self._table.find(self._key(tokens[-_GRAM:])) is not None
        return Evidence(_KIND) if known else None

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Drafter`; a draft ends where the table knows no more."""
        gram, self._draft = list(tokens[-_GRAM:]), []
        while len(self._draft) < count:
            token = self._table.find(self._key(gram))
            if token is None:
                break
            self._draft.append(token)
            gram = [*gram[1:], token]
        return self._draft

    def close(self) -> None:
        """See `Drafter`; the table is for all answers."""

    def _judge(self, following: Sequence[int]) -> None:
        """Compare the last draft with the tokens that followed."""
        draft, self._draft = self._draft, []
        if draft:
            pairs = enumerate(zip(draft, following, strict=False))
            wrong = next((i for i, (guess, token) in pairs if guess != token), len(draft))
            self._table.judge(drafted=len(draft), accepted=wrong)

    def _key(self, gram: Sequence[int]) -> int:
        return hash((self._root, *gram))


def _place(key: int) -> tuple[int, int]:
    return key % _SLOTS, key // _SLOTS & 0x7FFFFFFF
