"""Sampling's passes over the vocabulary, in C++ (`cpu.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.native import address

Floats = NDArray[np.float32]


class _Call(ctypes.Structure):
    """Arguments of one call of `candidates`; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "kept", "sums", "ids")),
        *((name, ctypes.c_int64) for name in ("stride", "count", "most")),
        *((name, ctypes.c_int32) for name in ("rows", "threads")),
    ]


def log_sum_exp(library: ctypes.CDLL, scores: NDArray[np.float32]) -> float:
    """Return the log-sum-exp of scores; see `log_sum_exp` in `__init__.py`."""
    values = floats(scores, (scores.size,), "scores")
    return float(library.edgellm_log_sum_exp(address(values), values.shape[0]))


def top_k(library: ctypes.CDLL, scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Return the ids of the `k` highest scores; see `top_k` in `__init__.py`."""
    values = floats(scores, (scores.size,), "scores")
    if k < 0:
        raise ValueError(f"k is {k}; it is 0 or more")
    ids = np.empty(k, np.int64)
    count = library.edgellm_top_k(address(values), values.shape[0], k, address(ids))
    return ids[:count].astype(np.intp)


def candidates(
    library: ctypes.CDLL, logits: Floats, wanted: Sequence[int], *, threads: int = 1
) -> list[tuple[float, NDArray[np.intp]]]:
    """Return log-sum-exp and best ids of each row; see `candidates` in `portable.py`."""
    if logits.dtype != np.float32 or logits.ndim != 2 or logits.strides[1] != logits.itemsize:
        raise ValueError(f"logits are float32 rows without gaps, not {logits.dtype}")
    rows, count = logits.shape
    if rows != len(wanted) or count < 1 or min(wanted, default=-1) < 0:
        raise ValueError(f"logits are {logits.shape}, and of each row are wanted {list(wanted)}")
    most = min(max(wanted), count)
    kept, sums, ids = np.array(wanted, np.int64), np.empty(rows), np.empty((rows, most), np.int64)
    call = _Call(
        address(logits),
        address(kept),
        address(sums),
        address(ids),
        logits.strides[0] // logits.itemsize,
        count,
        most,
        rows,
        threads,
    )
    library.edgellm_candidates(ctypes.byref(call))
    return [(float(sums[r]), ids[r, : kept[r]]) for r in range(rows)]
