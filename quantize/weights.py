"""Quantization of float weights: affine int4 and symmetric int8 in groups of 32, int8 in rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.quantized import (
    GROUP,
    KINDS,
    Kind,
    QuantizedWeight,
    concatenate,
    row_slices,
)

Floats = NDArray[np.float32]
# Codes, scale and offset of groups `[N, G, 32]`, codes as numbers from 0 on.
_Quantized = tuple[Floats, NDArray[np.float16], NDArray[np.float16] | None]

_AFFINE = KINDS["int4_affine"]
_SYMMETRIC = KINDS["int8_symmetric"]


def quantize_channels(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Quantize to codes `[N, K]` int8 and one scale a row `[N]` float32: `w = code * scale`."""
    scale = channel_scale(weight)
    divisor = np.where(scale > 0, scale, 1)
    return np.rint(weight / divisor[:, None]).astype(np.int8), scale


def channel_scale(weight: Floats) -> Floats:
    """Return the steps `[N]` of rows `[N, K]`, whose largest weights are 127 steps."""
    return np.asarray(np.abs(weight).max(axis=1) * np.float32(1 / 127))


def quantize_int4(weight: Floats) -> QuantizedWeight:
    """Quantize a weight; 16 levels cover each group: `scale = (max - min) / 15`, `offset = min`.

    Args:
        weight: `[N, K]` float32, K a multiple of 32.
    """

    def quantized(groups: Floats) -> _Quantized:
        low = groups.min(axis=-1).astype(np.float16)
        whole = low.astype(np.float32)
        scale = ((groups.max(axis=-1) - whole) * np.float32(1 / 15)).astype(np.float16)
        return _steps(groups - whole[..., None], scale).clip(0, 15), scale, low

    return _in_groups(weight, _AFFINE, quantized)


def quantize_groups(weight: Floats) -> QuantizedWeight:
    """Quantize a weight in groups of 32 around 0, with half-precision scales as in Q8_0.

    Args:
        weight: `[N, K]` float32, K a multiple of 32.
    """

    def quantized(groups: Floats) -> _Quantized:
        scale = (np.abs(groups).max(axis=-1) * np.float32(1 / 127)).astype(np.float16)
        return _steps(groups, scale).clip(-127, 127) + _SYMMETRIC.zero, scale, None

    return _in_groups(weight, _SYMMETRIC, quantized)


def quantize_levels(weight: Floats, levels: Sequence[int]) -> QuantizedWeight:
    """Quantize a weight to groups of int8 codes that are the integers themselves.

    The level of a group's largest weight is unknown: the level is taken with which all other
    weights come nearest to integers. The only error is the rounding of scales to halves, 2^-11 at
    most.

    Args:
        weight: `[N, K]` float32, K a multiple of 32; each group of 32 is a scale times integers, as
            in codebook types.
        levels: sizes of the integers, up to 127.
    """

    def quantized(groups: Floats) -> _Quantized:
        largest = np.abs(groups).max(axis=-1)
        least = np.full(largest.shape, np.inf, np.float32)
        scale = np.zeros_like(largest)
        for level in levels:
            step = largest / np.float32(level)
            ratio = groups / np.where(step > 0, step, 1)[..., None]
            error = np.abs(ratio - np.rint(ratio)).max(axis=-1) * step
            # of two that fit, the first one stays: a later one must more than halve the error
            better = error < least * np.float32(0.5)
            scale[better], least[better] = step[better], error[better]
        codes = _steps(groups, scale).clip(-127, 127) + _SYMMETRIC.zero
        return codes, scale.astype(np.float16), None

    return _in_groups(weight, _SYMMETRIC, quantized)


def _in_groups(
    weight: Floats, kind: Kind, quantized: Callable[[Floats], _Quantized]
) -> QuantizedWeight:
    """Quantize a weight some rows at a time, so that an interrupt can come between."""
    parts = []
    for rows in row_slices(*weight.shape):
        part = weight[rows]
        codes, scale, offset = quantized(part.reshape(len(part), -1, GROUP))
        shaped = codes.astype(np.uint8).reshape(part.shape)
        parts.append(QuantizedWeight(kind, shaped, scale, offset))
    return concatenate(parts)


def _steps(groups: Floats, scale: NDArray[np.floating]) -> Floats:
    """Return the whole steps of values `[N, G, 32]`, 0 where a group has no scale."""
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)
    return np.asarray(np.rint(groups / divisor[..., None]))
