"""Sampling's passes over the whole vocabulary: log-sum-exp of all logits, and the best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.native import library
from edgellm.kernels.sampling import native, portable

__all__ = ["MOST_CANDIDATES", "Logits", "log_sum_exp", "rows_of_logits", "top_k"]

# Largest k of a selection: for more tokens, a full sort is as fast.
_FEW = 1024
# Largest number of selected tokens: the usual 40, after penalties of 64 recent tokens.
MOST_CANDIDATES = 128


@dataclass(frozen=True)
class Logits:
    """Logits of the tokens that may come next.

    Attributes:
        scores: `[n]` float32.
        log_sum_exp: log-sum-exp over all tokens; a score minus it is a log-probability.
        ids: token id of each score `[n]`, ascending, for the best of all tokens; None: all tokens.
    """

    scores: NDArray[np.float32]
    log_sum_exp: float
    ids: NDArray[np.intp] | None = None

    def log_probability(self, token: int) -> float:
        """Return the log-probability of a token that has a score here."""
        place = token if self.ids is None else int(self.ids.searchsorted(token))
        return float(self.scores[place]) - self.log_sum_exp

    def best(self, count: int) -> dict[int, float]:
        """Return the log-probabilities of the `count` most likely tokens, the most likely first."""
        if count == 0:
            return {}
        places = top_k(self.scores, count)
        tokens = places if self.ids is None else self.ids[places]
        return {int(token): self.log_probability(int(token)) for token in tokens}


def log_sum_exp(scores: NDArray[np.float32]) -> float:
    """Return log(sum(exp(scores))) of `[V]`; a logit minus it is a log-probability."""
    compiled = library()
    if compiled is None:
        return portable.log_sum_exp(scores)
    return native.log_sum_exp(compiled, scores)


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Return the ids of the `k` highest of `[V]` scores, highest first, equal scores by id.

    If k is 0, all ids are returned. NaN scores are left out only if there are k others.
    """
    compiled = library()
    if compiled is None or not 0 < k <= _FEW or k >= scores.shape[0]:
        return portable.top_k(scores, k)
    return native.top_k(compiled, scores, k)


def rows_of_logits(
    logits: NDArray[np.float32], wanted: Sequence[int], *, threads: int = 1
) -> list[Logits]:
    """Return rows `[n, V]` of logits for sampling, each with all scores or only its best.

    Args:
        wanted: number of best scores to keep of each row; 0: all scores. A row with scores of NaN
            or infinity keeps all.
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
