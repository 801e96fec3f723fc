"""The Walsh-Hadamard transform of heads: it spreads an outlier over all of a head's dimensions.

A head of `D` dimensions is transformed in blocks of the largest power of two that divides `D`. The
matrix is orthogonal and its own inverse, so `(q H) . (k H) = q . k`. Rounding to few bits loses
less after the transform (QuaRot, Ashkboos et al., arXiv:2404.00456).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["matrix", "power_of_two_factor", "transform"]


@cache
def matrix(size: int) -> NDArray[np.float64]:
    """Return the normalized Hadamard matrix of a power-of-two `size`, in Sylvester's order.

    The array is read-only.

    Raises:
        ValueError: the size is no power of two.
    """
    signs = np.ones((1, 1))
    while signs.shape[0] < size:
        signs = np.block([[signs, signs], [signs, -signs]])
    if signs.shape[0] != size:
        raise ValueError(f"a Hadamard matrix of size {size} was asked for; sizes are powers of two")
    signs = np.asarray(signs / np.sqrt(size), np.float64)
    signs.setflags(write=False)
    return signs


def power_of_two_factor(size: int, *, limit: int) -> int:
    """Return the largest power of two, at most `limit`, that divides `size`."""
    return min(size & -size, limit)


def transform(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Transform rows `[..., D]` in blocks of the largest power of two that divides `D`."""
    width = x.shape[-1]
    size = power_of_two_factor(width, limit=width)
    # Rows lie side by side, so that sums run over long vectors: 512 rows of 3 heads take 0.7 ms
    # instead of 2.6. A matrix product would give a row other bits beside other rows.
    columns = np.array(x.reshape(-1, width).T, np.float32, order="C")
    other = np.empty_like(columns)
    half = 1
    while half < size:
        before, after = (c.reshape(width // (2 * half), 2, half, -1) for c in (columns, other))
        np.add(before[:, 0], before[:, 1], out=after[:, 0])
        np.subtract(before[:, 0], before[:, 1], out=after[:, 1])
        columns, other = other, columns
        half *= 2
    columns *= np.float32(1) / np.sqrt(np.float32(size))
    return np.ascontiguousarray(columns.T).reshape(x.shape)
