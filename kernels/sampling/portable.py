"""Sampling's passes over the vocabulary, in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Bits of a float32 NaN, which are above those of infinity.
_NAN = np.int32(0x7FC00000)


def log_sum_exp(scores: NDArray[np.float32]) -> float:
    """Return the log-sum-exp of scores; see `log_sum_exp` in `__init__.py`."""
    largest = float(scores.max())
    return largest + float(np.log(np.exp(scores - np.float32(largest), dtype=np.float64).sum()))


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Return the ids of the `k` highest scores; see `top_k` in `__init__.py`."""
    count = scores.shape[0]
    if 0 < k < count:
        # every score above the k-th stays; scores equal to it fill up in the order of ids
        threshold = np.partition(scores, count - k)[count - k]
        ids = np.flatnonzero(scores >= threshold)
    else:
        ids = np.arange(count)
    return ids[_descending(scores[ids])][: k or None]


def _descending(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the order of scores from the highest on, equal scores by index, NaN last.

    Integers of a score's bits and its index are sorted, which have no ties. A stable argsort of
    49,152 scores takes 3.7 ms, and this 0.7 ms (152,000 scores: 25 and 3 ms).
    """
    down = np.float32(0) - scores  # never -0.0, whose bits differ from those of 0.0
    bits = down.view(np.int32)
    ordered = np.where(np.isnan(down), _NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    keys = (ordered.astype(np.int64) << 32) | np.arange(len(scores))
    keys.sort()
    return keys & 0xFFFFFFFF


def candidates(
    logits: NDArray[np.float32], wanted: Sequence[int]
) -> list[tuple[float, NDArray[np.intp]]]:
    """Return the log-sum-exp of each row `[V]`, and the ids of its `wanted` best, ascending.

    A row whose sum is not finite has no ids, because all its scores are needed.
    """
    results = []
    for row, k in zip(logits, wanted, strict=True):
        total = log_sum_exp(row)
        searched = k > 0 and math.isfinite(total)
        results.append((total, np.sort(top_k(row, k)) if searched else np.empty(0, np.intp)))
    return results
