"""Drafts of the next tokens from earlier ones, and when they pay. Pure Python.

Text that is edited, quoted or summarized repeats parts of the prompt. The tokens that followed the
last ones at an earlier place are a draft of those that follow now; a step over several rows checks
it in one go (Saxena, Prompt Lookup Decoding, 2023; Yang et al., arXiv:2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

# Numbers of last tokens that must have stood together before, the longer first.
_MATCHES = (4, 3)
_LONGEST = 8
# Weight of the old value in averages.
_KEEP = 0.8
# Plain steps in a row after drafts that did not pay.
_REST = 16


class PromptLookup:
    """Lookup of the tokens that followed the last tokens at an earlier place."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> None:
        end = len(self._tokens)
        for size in _MATCHES:
            if end >= size:
                self._after[tuple(self._tokens[end - size :])] = end
        self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """Return at most `count` tokens that may come next; none without an earlier match."""
        for size in _MATCHES:
            at = self._after.get(tuple(self._tokens[-size:]))
            if at is not None and len(self._tokens) > size:
                return self._tokens[at : at + count]
        return []


class DraftPolicy:
    """Length of drafts that pay, from the times of steps and the number of accepted tokens.

    Timings decide nothing but the length of drafts: the answer is the same with any.
    """

    def __init__(self) -> None:
        self._length = 2
        self._plain_s = 0.0
        self._drafted_s = 0.0  # per token
        self._rest = 0

    def length(self) -> int:
        """Return the number of tokens to draft next; 0: no draft in this step."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._length if self._plain_s else 0  # the first steps say what a plain one costs

    def plain(self, seconds: float) -> None:
        """Learn the seconds of a step without a draft."""
        self._plain_s = _average(self._plain_s, seconds)

    def drafted(self, seconds: float, *, drafted: int, accepted: int) -> None:
        """Learn the seconds of a step with `drafted` draft tokens, `accepted` of them right."""
        self._drafted_s = _average(self._drafted_s, seconds / (accepted + 1))
        if accepted == drafted:
            self._length = min(2 * self._length, _LONGEST)
        elif accepted == 0:
            self._length = max(1, self._length // 2)
        if self._drafted_s > self._plain_s:
            self._rest = _REST
            self._drafted_s = 0.0
            self._length = 2


def _average(old: float, new: float) -> float:
    return new if not old else _KEEP * old + (1 - _KEEP) * new
