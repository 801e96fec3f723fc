"""What sampling asks of the whole vocabulary: the sum of all probabilities, and the best tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.native import library
from edgellm.kernels.sampling import native, portable

__all__ = ["log_sum_exp", "top_k"]

# Of many, a full sort finds as fast as anything else.
_FEW = 1024


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
