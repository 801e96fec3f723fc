"""The Walsh-Hadamard transform in numpy: sums and differences, in the order of `cpu.h`."""

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
    half = 1
    # no matrix product: a row must have the same bits however many others come with it
    while half < size:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
        half *= 2
    return np.asarray(x * (np.float32(1) / np.sqrt(np.float32(size))), np.float32)
