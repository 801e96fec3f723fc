"""Drafts from an answer's own tokens: those that followed the last ones at an earlier place."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.engine.draft_policy import Evidence, Kind

# Numbers of last tokens that must have stood together before, the longest first. Chance finds some
# places of three tokens in any text; where 16 stood before, a file is being copied.
_MATCHES = (16, 8, 4, 3)
_LONGEST_MATCH = 64
# Tokens of a text that a step enters at most, beside new ones: 4 ms.
_AT_ONCE = 2048
# Share of draft tokens that are right after matches of 3, 4, 8, 16, and 32 tokens and more.
_KINDS = tuple(Kind("lookup", share, most=63) for share in (0.4, 0.6, 0.8, 0.9, 0.95))


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
