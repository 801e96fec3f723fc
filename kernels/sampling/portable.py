"""Sampling's passes over the vocabulary, in numpy."""

from __future__ import annotations

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
