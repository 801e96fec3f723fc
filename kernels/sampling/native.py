"""Sampling's passes over the vocabulary, in C++ (`cpu.cpp`)."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.native import address


def log_sum_exp(library: ctypes.CDLL, scores: NDArray[np.float32]) -> float:
    """See `log_sum_exp` in `__init__.py`."""
    values = floats(scores, (scores.size,), "scores")
    return float(library.edgellm_log_sum_exp(address(values), values.shape[0]))


def top_k(library: ctypes.CDLL, scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """See `top_k` in `__init__.py`."""
    values = floats(scores, (scores.size,), "scores")
    if k < 0:
        raise ValueError(f"k is {k}; it is 0 or more")
    ids = np.empty(k, np.int64)
    count = library.edgellm_top_k(address(values), values.shape[0], k, address(ids))
    return ids[:count].astype(np.intp)
