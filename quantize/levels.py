"""Float weights that are known to be a few integers times a scale, as codebook types have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.quantized import GROUP, KINDS, QuantizedWeight, concatenate, row_slices

_INT8 = KINDS["int8_symmetric"]


def quantize_levels(weight: NDArray[np.float32], levels: Sequence[int]) -> QuantizedWeight:
    """int8 groups whose codes are the integers themselves.

    Which level a group's largest weight is on is not known; the one is taken with which all others
    come nearest to integers. What remains is the rounding of scales to halves, 2^-11 at most.

    Args:
        weight: `[N, K]` float32, K a multiple of 32; each group of 32 is a scale times integers.
        levels: the sizes of the integers, up to 127.
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
        # of two levels that fit, the lower: its error is smaller by more than float32 rounds
        better = error < least * np.float32(0.5)
        scale[better], least[better] = step[better], error[better]
    divisor = np.where(scale > 0, scale, 1)[..., None]
    codes = np.rint(groups / divisor).clip(-127, 127) + _INT8.zero
    halves = scale.astype(np.float16)
    return QuantizedWeight(_INT8, codes.astype(np.uint8).reshape(weight.shape), halves)
