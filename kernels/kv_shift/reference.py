"""Reference of the KV shift: one token and one head at a time, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.rope import reference as rope


def move(
    k: NDArray[np.floating], distance: int, inv_freq: Sequence[float]
) -> NDArray[np.float64]:  # [C, Hkv, D] -> [C, Hkv, D]
    """Turn keys after RoPE to the keys of the same tokens `distance` positions earlier."""
    out = np.empty(k.shape, np.float64)
    for token in range(k.shape[0]):
        out[token] = rope.apply(k[token : token + 1], inv_freq, -distance)[0]
    return out
