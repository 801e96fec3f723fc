"""What sampling asks of the whole vocabulary: the sum of all probabilities, and the best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.native import library
from edgellm.kernels.sampling import native, portable

__all__ = ["MOST_CANDIDATES", "Logits", "log_sum_exp", "rows_of_logits", "top_k"]

# Of more than these, a full sort is as fast as anything else.
_FEW = 1024
# The most tokens that are selected: the usual 40, after penalties of 64 recent ones.
MOST_CANDIDATES = 128


@dataclass(frozen=True)
class Logits:
    """Scores of the tokens that may come next.

    Attributes:
        scores: `[n]` float32.
        log_sum_exp: of all tokens' scores; one of them minus it is a log-probability.
        ids: `[n]`, ascending: which tokens they belong to, the best ones of all; None: all tokens.
    """

    scores: NDArray[np.float32]
    log_sum_exp: float
    ids: NDArray[np.intp] | None = None

    def log_probability(self, token: int) -> float:
        """The log-probability of a token that is among them."""
        place = token if self.ids is None else int(self.ids.searchsorted(token))
        return float(self.scores[place]) - self.log_sum_exp

    def best(self, count: int) -> dict[int, float]:
        """The log-probabilities of the `count` most likely tokens, from the first one on."""
        if count == 0:
            return {}
        places = top_k(self.scores, count)
        tokens = places if self.ids is None else self.ids[places]
        return {int(token): self.log_probability(int(token)) for token in tokens}


def log_sum_exp(scores: NDArray[np.float32]) -> float:
    """log(sum(exp(scores))) of `[V]`; a logit minus it is a log-probability."""
    compiled = library()
    if compiled is None:
        return portable.log_sum_exp(scores)
    return native.log_sum_exp(compiled, scores)


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Ids of the `k` highest of `[V]` scores, highest first; equal scores by id; all if k is 0.

    Scores that are not a number are left out only if there are k others.
    """
    compiled = library()
    if compiled is None or not 0 < k <= _FEW or k >= scores.shape[0]:
        return portable.top_k(scores, k)
    return native.top_k(compiled, scores, k)


def rows_of_logits(
    logits: NDArray[np.float32], wanted: Sequence[int], *, threads: int = 1
) -> list[Logits]:
    """Rows `[n, V]` for sampling, each with all scores or with its best.

    Args:
        wanted: how many of the best of each row will do; 0: all of them. A row with scores that
            are not a number, or infinite, has all.
    """
    if not wanted:
        return []
    compiled = library()
    if compiled is None:
        best = portable.candidates(logits, wanted)
    else:
        best = native.candidates(compiled, logits, wanted, threads=threads)
    return [
        Logits(row[ids], total, ids) if len(ids) else Logits(row, total)
        for row, (total, ids) in zip(logits, best, strict=True)
    ]
