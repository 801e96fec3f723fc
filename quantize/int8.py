"""Quantization of float weights to symmetric int8, per output channel or per group of 32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.quantized import GROUP, KINDS, QuantizedWeight, concatenate, row_slices

_SYMMETRIC = KINDS["int8_symmetric"]


def quantize_channels(
    weight: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize to codes `[N, K]` int8 and one scale a row `[N]` float32: `w = code * scale`."""
    scale = channel_scale(weight)
    divisor = np.where(scale > 0, scale, 1)
    return np.rint(weight / divisor[:, None]).astype(np.int8), scale


def channel_scale(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the steps `[N]` of rows `[N, K]`, whose largest weights are 127 steps."""
    return np.asarray(np.abs(weight).max(axis=1) * np.float32(1 / 127))


def quantize_groups(weight: NDArray[np.float32]) -> QuantizedWeight:
    """Quantize a weight in groups of 32 around 0, with half-precision scales as in Q8_0.

    Args:
        weight: `[N, K]` float32, K a multiple of 32.
    """
    return concatenate([_quantize_rows(weight[rows]) for rows in row_slices(*weight.shape)])


def _quantize_rows(weight: NDArray[np.float32]) -> QuantizedWeight:
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scale = (np.abs(groups).max(axis=-1) * np.float32(1 / 127)).astype(np.float16)
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = np.rint(groups / divisor[..., None]).clip(-127, 127) + _SYMMETRIC.zero
    return QuantizedWeight(_SYMMETRIC, codes.astype(np.uint8).reshape(weight.shape), scale)
