"""Reference of RoPE: one pair of channels at a time, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def apply(
    x: NDArray[np.floating], inv_freq: Sequence[float], start: int, magnitude: float = 1.0
) -> NDArray[np.float64]:  # [C, H, D] -> [C, H, D]
    """Rotate the heads of tokens at positions `start ..`.

    Rotated channels are also multiplied by `magnitude`.
    """
    out, half = x.astype(np.float64), len(inv_freq)
    for i, frequency in enumerate(inv_freq):
        angles = (start + np.arange(x.shape[0]))[:, None] * frequency
        a, b = x[:, :, i].astype(np.float64), x[:, :, half + i].astype(np.float64)
        cos, sin = magnitude * np.cos(angles), magnitude * np.sin(angles)
        out[:, :, i] = a * cos - b * sin
        out[:, :, half + i] = b * cos + a * sin
    return out
