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


# Columns of a block: errors move one by one within a block, and together onto columns behind it.
_BLOCK = 64
# Share of the mean square input that is added to every input's: directions that calibration hardly
# shows must not be free.
_DAMPING = 0.01


def quantize_channels_for(
    weight: NDArray[np.float32], moments: NDArray[np.float32]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round a weight as `quantize_channels` does, to the same scales, for inputs of known moments.

    Errors compensate each other for the inputs that were seen: the error of a weight's products
    counts, tr(E M E^T) for weight errors E [N, K] and second moments M = mean(x^T x) of the inputs.
    Columns are rounded one after the other, and the errors of all columns before are moved onto the
    next one (GPTQ, Frantar et al., arXiv:2210.17323, in the form that QuIP calls LDLQ and shows to
    be the same, Chee et al., arXiv:2307.13304, section 4.1):

        q_k = round(w_k + sum over i < k of (w_i - q_i) A[i, k])        M = A D A^T, A unit upper

    Args:
        weight: `[N, K]`.
        moments: second moments of the inputs, `[K, K]`.

    Returns:
        Codes `[N, K]` int8 and one scale a row `[N]` float32: `w = code * scale`.
    """
    scale = channel_scale(weight)
    feedback = _feedback(moments)
    exact = (weight / np.where(scale > 0, scale, 1)[:, None]).T  # [K, N], in steps
    codes = np.empty(exact.shape, np.int8)
    errors = np.empty(exact.shape, np.float32)
    for first in range(0, len(exact), _BLOCK):
        block = slice(first, first + _BLOCK)
        target = exact[block] + feedback[:first, block].T @ errors[:first]
        for k, row in enumerate(target, first):
            codes[k] = np.rint(row).clip(-127, 127)
            errors[k] = exact[k] - codes[k]
            target[k - first + 1 :] += feedback[k, k + 1 : block.stop, None] * errors[k]
    return np.ascontiguousarray(codes.T), scale


def _feedback(moments: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return A of `quantize_channels_for`'s formula, `[K, K]`."""
    damped = moments.astype(np.float64)
    diagonal = np.einsum("kk->k", damped)
    diagonal += _DAMPING * diagonal.mean() or 1.0  # without any input, nothing is moved
    # M = R R^T with R upper: a Cholesky decomposition from the last column to the first
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return np.asarray(upper / np.einsum("kk->k", upper), np.float32)
