"""Float weights to int4 group-32 affine, round to nearest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.int4 import GROUP, Int4Weight, pack


def quantize_int4(weight: NDArray[np.float32]) -> Int4Weight:
    """Cover each group's range with 16 levels: `scale = (max - min) / 15`, `offset = min`.

    Both are rounded to half precision, in which Q4_1 and the native kernels store them.

    Args:
        weight: `[N, K]` float32, K a multiple of 32.
    """
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low = _half(groups.min(axis=-1))
    scale = _half((groups.max(axis=-1) - low) * np.float32(1 / 15))
    divisor = np.where(scale > 0, scale, 1)
    codes = np.rint((groups - low[..., None]) / divisor[..., None]).clip(0, 15)
    return Int4Weight(pack(codes.astype(np.uint8).reshape(weight.shape)), scale, low)


def _half(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values.astype(np.float16).astype(np.float32)
