"""Reference of RoPE: one token, one head, one pair at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def apply(
    x: NDArray[np.floating], inv_freq: Sequence[float], start: int, magnitude: float = 1.0
) -> NDArray[np.float64]:  # [C, H, D] -> [C, H, D]
    """Rotate the heads of tokens at positions `start ..`.

    Rotated channels are also multiplied by `magnitude`.
    """
    out = x.astype(np.float64)
    half = len(inv_freq)
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            for i, frequency in enumerate(inv_freq):
                angle = (start + token) * frequency
                a, b = float(x[token, head, i]), float(x[token, head, half + i])
                cos, sin = magnitude * math.cos(angle), magnitude * math.sin(angle)
                out[token, head, i] = a * cos - b * sin
                out[token, head, half + i] = b * cos + a * sin
    return out
