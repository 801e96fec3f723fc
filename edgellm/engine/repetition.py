"""Detection of an answer that repeats itself over and over."""

from __future__ import annotations

from collections.abc import Sequence

# Repetitions that make a loop, and number of tokens after which a loop is looked for again.
_TIMES = 4
_EVERY = 16


class RepetitionGuard:
    """Detector of a loop at the end of an answer.

    Args:
        limit: last tokens that must repeat one sequence, at least four times; 0: never looks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def loops(self, tokens: Sequence[int]) -> bool:
        """Whether the last `limit` tokens are a loop; looked at after every 16th token."""
        if not self._limit or len(tokens) < self._limit or len(tokens) % _EVERY:
            return False
        return shortest_period(tokens[-self._limit :]) * _TIMES <= self._limit


def shortest_period(tokens: Sequence[int]) -> int:
    """Find the smallest p with `tokens[i] == tokens[i - p]` for all i >= p (Knuth-Morris-Pratt)."""
    borders = [0] * len(tokens)  # of each prefix: its longest proper suffix that is also a prefix
    border = 0
    for i in range(1, len(tokens)):
        while border and tokens[i] != tokens[border]:
            border = borders[border - 1]
        border += tokens[i] == tokens[border]
        borders[i] = border
    return len(tokens) - border
