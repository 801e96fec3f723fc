"""Sampling's passes over the vocabulary, in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def log_sum_exp(scores: NDArray[np.float32]) -> float:
    """See `log_sum_exp` in `__init__.py`."""
    largest = float(scores.max())
    return largest + float(np.log(np.exp(scores - np.float32(largest), dtype=np.float64).sum()))


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """See `top_k` in `__init__.py`."""
    count = scores.shape[0]
    if 0 < k < count:
        # every score above the k-th stays; of those equal to it, the first ids fill up
        threshold = np.partition(scores, count - k)[count - k]
        ids = np.flatnonzero(scores >= threshold)
    else:
        ids = np.arange(count)
    order = np.argsort(-scores[ids], kind="stable")
    return ids[order][: k or None]


def candidates(
    logits: NDArray[np.float32], wanted: Sequence[int]
) -> list[tuple[float, NDArray[np.intp]]]:
    """The log-sum-exp of each row `[V]`, and ids of its `wanted` best, ascending.

    There are none where the sum is not finite: of such a row all is needed.
    """
    results = []
    for row, k in zip(logits, wanted, strict=True):
        total = log_sum_exp(row)
        searched = k > 0 and math.isfinite(total)
        results.append((total, np.sort(top_k(row, k)) if searched else np.empty(0, np.intp)))
    return results
