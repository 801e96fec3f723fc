"""Quantization of float weights to affine int4 in groups of 32, rounded to nearest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.quantized import GROUP, KINDS, QuantizedWeight, concatenate, row_slices

_AFFINE = KINDS["int4_affine"]


def quantize_int4(weight: NDArray[np.float32]) -> QuantizedWeight:
    """Quantize a weight; 16 levels cover each group: `scale = (max - min) / 15`, `offset = min`.

    Args:
        weight: `[N, K]` float32, K a multiple of 32.
    """
    return concatenate([_quantize_rows(weight[rows]) for rows in row_slices(*weight.shape)])


def _quantize_rows(weight: NDArray[np.float32]) -> QuantizedWeight:
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low = groups.min(axis=-1).astype(np.float16)
    whole = low.astype(np.float32)
    scale = ((groups.max(axis=-1) - whole) * np.float32(1 / 15)).astype(np.float16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = np.rint((groups - whole[..., None]) / divisor[..., None]).clip(0, 15)
    return QuantizedWeight(_AFFINE, codes.astype(np.uint8).reshape(weight.shape), scale, low)
