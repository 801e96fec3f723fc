"""Notices an answer that only says the same again and again."""

from __future__ import annotations

from collections.abc import Sequence

# Repetitions that make a loop, and after how many tokens it is looked for again.
_TIMES = 4
_EVERY = 16


class RepetitionGuard:
    """Looks at the end of an answer.

    Args:
        limit: tokens that must be one sequence over and over, at least four times; 0 never looks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def loops(self, tokens: Sequence[int]) -> bool:
        """Whether the last `limit` tokens are such a loop; looked at after every 16th token."""
        if not self._limit or len(tokens) < self._limit or len(tokens) % _EVERY:
            return False
        return shortest_period(tokens[-self._limit :]) * _TIMES <= self._limit


def shortest_period(tokens: Sequence[int]) -> int:
    """The smallest p with `tokens[i] == tokens[i - p]` for all i >= p (Knuth-Morris-Pratt)."""
    borders = [0] * len(tokens)  # of each head: the longest proper end that is also its beginning
    border = 0
    for i in range(1, len(tokens)):
        while border and tokens[i] != tokens[border]:
            border = borders[border - 1]
        border += tokens[i] == tokens[border]
        borders[i] = border
    return len(tokens) - border
