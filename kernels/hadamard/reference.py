"""The Walsh-Hadamard transform by its definition, in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray


@cache
def _signs(size: int) -> NDArray[np.float64]:
    """Return the matrix of (-1)^popcount(i & j), `[size, size]`."""
    bits = range(size)
    return np.array([[(-1.0) ** (i & j).bit_count() for j in bits] for i in bits])


def transform(x: NDArray[np.floating]) -> NDArray[np.float64]:  # [..., D] -> [..., D]
    """Transform rows in blocks of `n` = the largest power of two that divides D.

    Element `i` of a block becomes the sum over `j` of (-1)^popcount(i & j) x[j] / sqrt(n).
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return np.asarray(blocks @ _signs(size) / np.sqrt(size)).reshape(x.shape)
