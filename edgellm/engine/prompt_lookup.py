"""Drafts from text: the tokens that followed the last ones at an earlier place.

A table of the tokens of all answers of a loaded model is llama.cpp's ngram-mod, with a check of
each entry in the place of very long drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.engine.draft_policy import Evidence, Kind
from edgellm.options import MOST_DRAFTED

# Numbers of last tokens that must have stood together before, the longest first. Chance finds some
# places of three tokens in any text; where 16 stood before, a file is being copied.
_MATCHES = (16, 8, 4, 3)
_LONGEST_MATCH = 64
# Tokens of a text that a step enters at most, beside new ones: 4 ms.
_AT_ONCE = 2048
# Share of draft tokens that are right after matches of 3, 4, 8, 16, and 32 tokens and more.
_KINDS = tuple(Kind("lookup", share, most=MOST_DRAFTED) for share in (0.4, 0.6, 0.8, 0.9, 0.95))
# Number of last tokens that name an entry. 16 find less of code that is written again, and of the
# drafts of 8 fewer are right (117 of 293, of 12 92 of 145).
_GRAM = 12
# 16 MiB: the token and the check of an entry have 4 bytes each.
_SLOTS = 1 << 21
_KIND = Kind("table", 0.7, most=MOST_DRAFTED)
# Drafts in a row with a smaller share of right tokens than this, after which all is forgotten.
_BAD, _RIGHT = 5, 0.25


class PromptLookup:
    """Lookup of the tokens that followed the last tokens at an earlier place.

    Saxena, "Prompt Lookup Decoding", 2023.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Begin with a text; `look_back` enters its places."""
        self._tokens = list(tokens)
        # by hash: a tuple as a key takes 170 bytes more for 16 tokens
        self._after: list[dict[int, int]] = [{} for _ in _MATCHES]
        self._unseen = len(self._tokens)  # places before this one are not entered

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> None:
        end = len(self._tokens)
        for size, after in zip(_MATCHES, self._after, strict=True):
            if end >= size:
                after[self._key(size, end)] = end
        self._tokens.append(token)

    def look_back(self, count: int) -> None:
        """Enter up to `count` of the text's places that are not entered, the last ones first."""
        first = max(0, self._unseen - count)
        for end in range(self._unseen - 1, first - 1, -1):
            for size, after in zip(_MATCHES, self._after, strict=True):
                if end >= size:
                    after.setdefault(self._key(size, end), end)  # a later place is there already
        self._unseen = first

    def match(self) -> tuple[int, int]:
        """Return the place behind an earlier match, and the number of tokens that match.

        The number is at most 64; 0: there is no such place.
        """
        for size, after in zip(_MATCHES, self._after, strict=True):
            at = after.get(self._key(size, len(self._tokens)))
            if at is not None and len(self._tokens) > size:
                length = self._common(at)
                if length >= size:  # not other tokens of the same hash
                    return at, length
        return len(self._tokens), 0

    def following(self, at: int, count: int) -> list[int]:
        """Return the `count` tokens that begin at `at`; behind the end what repeats goes on."""
        period = len(self._tokens) - at
        return [self._tokens[at + i % period] for i in range(count if period else 0)]

    def _key(self, size: int, end: int) -> int:
        return hash(tuple(self._tokens[max(0, end - size) : end]))

    def _common(self, at: int) -> int:
        """Count the tokens before `at` that the last ones are the same as."""
        tokens, end, length = self._tokens, len(self._tokens), 0
        most = min(at, _LONGEST_MATCH)
        while length < most and tokens[at - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


def kind_of_match(length: int) -> Kind:
    """Return the kind of evidence that a match of `length` tokens, 3 or more, is."""
    return _KINDS[min(max(length.bit_length() - 2, 0), len(_KINDS) - 1)]


class LookupDrafter:
    """A drafter that looks up the last tokens among the `most` tokens before them."""

    name = "lookup"

    def __init__(self, most: int) -> None:
        self._most = most
        self._lookup: PromptLookup | None = None
        self._seen = 0  # tokens of the answer that the lookup knows, or has left out
        self._at = 0

    def evidence(self, tokens: Sequence[int]) -> Evidence | None:
        """See `Drafter`; the longer the match, the more of its tokens are right."""
        lookup, new = self._lookup, tokens[self._seen :]
        # 296 bytes and 1.9 µs a token: made where a draft is wanted, of the last tokens alone, and
        # of a long text in several steps
        shifted = len(tokens) < self._seen
        if lookup is None or shifted or len(lookup) + len(new) > 2 * self._most:
            lookup = self._lookup = PromptLookup(tokens[-self._most :])
        else:
            for token in new:
                lookup.add(token)
        lookup.look_back(_AT_ONCE)
        self._seen = len(tokens)
        self._at, length = lookup.match()
        return Evidence(kind_of_match(length)) if length else None

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Drafter`."""
        return [] if self._lookup is None else self._lookup.following(self._at, count)

    def close(self) -> None:
        """See `Drafter`; its memory is the answer's own."""


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
