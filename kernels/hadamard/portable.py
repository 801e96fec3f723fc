"""The Walsh-Hadamard transform in numpy: a product with its matrix."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray


@cache
def matrix(size: int) -> NDArray[np.float64]:
    """The normalized Hadamard matrix of a power-of-two `size`, in Sylvester's order; read-only."""
    found = np.ones((1, 1))
    while found.shape[0] < size:
        found = np.block([[found, found], [found, -found]])
    if found.shape[0] != size:
        raise ValueError(f"a Hadamard matrix of size {size} was asked for; sizes are powers of two")
    found = np.asarray(found / np.sqrt(size), np.float64)
    found.setflags(write=False)
    return found


def power_of_two_factor(size: int, *, limit: int) -> int:
    """The largest power of two, at most `limit`, that divides `size`."""
    return min(size & -size, limit)


def transform(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows `[..., D]`, each in blocks of the largest power of two that divides `D`."""
    size = power_of_two_factor(x.shape[-1], limit=x.shape[-1])
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return np.asarray(blocks @ matrix(size).astype(np.float32), np.float32).reshape(x.shape)
