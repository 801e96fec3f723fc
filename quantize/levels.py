"""Exact int8 codes for float weights that are a few integers times a scale (codebook types)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.quantized import GROUP, KINDS, QuantizedWeight, concatenate, row_slices

_INT8 = KINDS["int8_symmetric"]


def quantize_levels(weight: NDArray[np.float32], levels: Sequence[int]) -> QuantizedWeight:
    """Quantize a weight to groups of int8 codes that are the integers themselves.

    The level of a group's largest weight is unknown: the level is taken with which all other
    weights come nearest to integers. The only error is the rounding of scales to halves, 2^-11 at
    most.

    Args:
        weight: `[N, K]` float32, K a multiple of 32; each group of 32 is a scale times integers.
        levels: sizes of the integers, up to 127.
    """
    return concatenate([_quantize_rows(weight[rows], levels) for rows in row_slices(*weight.shape)])


def _quantize_rows(weight: NDArray[np.float32], levels: Sequence[int]) -> QuantizedWeight:
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    least = np.full(largest.shape, np.inf, np.float32)
    scale = np.zeros_like(largest)
    for level in levels:
        step = largest / np.float32(level)
        ratio = groups / np.where(step > 0, step, 1)[..., None]
        error = np.abs(ratio - np.rint(ratio)).max(axis=-1) * step
        # of two levels that fit, the first one stays: a later one must more than halve the error
        better = error < least * np.float32(0.5)
        scale[better], least[better] = step[better], error[better]
    divisor = np.where(scale > 0, scale, 1)[..., None]
    codes = np.rint(groups / divisor).clip(-127, 127) + _INT8.zero
    halves = scale.astype(np.float16)
    return QuantizedWeight(_INT8, codes.astype(np.uint8).reshape(weight.shape), halves)
