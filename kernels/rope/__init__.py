"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864), half-split layout.

Element `i` of the first half is rotated with element `i` of the second half by the angle
`position * inv_freq[i]`; dimensions past `2 * len(inv_freq)` are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["RopeTable", "apply", "table"]


# Positions whose float64 angles are in memory at once.
_AT_ONCE = 4096


class RopeTable(NamedTuple):
    """Cosines and sines of every position, each `[positions, len(inv_freq)]` float32."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def table(inv_freq: Sequence[float], positions: int, *, magnitude: float = 1.0) -> RopeTable:
    """Make the table for the first `positions` positions, cosines and sines times `magnitude`.

    Angles are float64: a float32 product has an error of 6e-5 rad at position 1000.
    """
    shape = positions, len(inv_freq)
    cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for start in range(0, positions, _AT_ONCE):
        part = np.arange(start, min(start + _AT_ONCE, positions), dtype=np.float64)
        angles = part[:, None] * np.asarray(inv_freq)
        cos[start : start + len(part)] = magnitude * np.cos(angles)
        sin[start : start + len(part)] = magnitude * np.sin(angles)
    return RopeTable(cos, sin)


def apply(
    x: NDArray[np.float32], table: RopeTable, start: int
) -> NDArray[np.float32]:  # [C, H, D] -> [C, H, D]
    """Rotate the heads of tokens at positions `start ..` into a new array."""
    tokens, half = x.shape[0], table.cos.shape[1]
    cos = table.cos[start : start + tokens, None, :]
    sin = table.sin[start : start + tokens, None, :]
    a, b = x[..., :half], x[..., half : 2 * half]
    out = np.empty_like(x)
    out[..., :half] = a * cos - b * sin
    out[..., half : 2 * half] = b * cos + a * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
