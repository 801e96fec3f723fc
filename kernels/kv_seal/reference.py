"""Reference of sealing: one KV head of a full block at a time, in float64."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.hadamard import reference as hadamard
from edgellm.kernels.kv_append.reference import quantize_row, round_trip
from edgellm.kernels.kv_blocks import BLOCK, SEALINGS, KVFormat
from edgellm.kernels.sealed_blocks import sealed_end

Floats = NDArray[np.float64]
# Half the step that four levels fit best, for normally distributed numbers with a spread of 1.
FIRST_STEP = 0.498


def sealed_rows(rows: NDArray[np.floating], format: KVFormat, *, key: bool) -> Floats:
    """Return the rows `[BLOCK, Hkv, D]` of a block as attention reads them once it is sealed.

    Args:
        rows: K less the key offset, or V.
        key: whether the rows are keys, not values.
    """
    sealing = SEALINGS[format]
    if not key:
        values = functools.partial(value_row, bits=sealing.value_bits, scales=sealing.value_scales)
        return hadamard.transform(np.apply_along_axis(values, 2, hadamard.transform(rows)))
    if not sealing.channels:
        return hadamard.transform(np.apply_along_axis(key_row, 2, hadamard.transform(rows)))
    return np.apply_along_axis(channel, 0, round_trip(rows, format, key=True))


def with_sealed(
    rows: NDArray[np.floating], held: Floats, format: KVFormat, position: int, *, key: bool
) -> Floats:
    """Return rows `[length, Hkv, D]` of K or V as a query at `position` reads them.

    Args:
        held: the rows as `round_trip` gives them.
    """
    read = held[: position + 1].copy()
    for begin in range(BLOCK, BLOCK * sealed_end(position + 1), BLOCK):
        part = slice(begin, begin + BLOCK)
        read[part] = sealed_rows(rows[part], format, key=key)
    return read


def best_blocks(q: NDArray[np.floating], keys: Floats, position: int, kv_read: int) -> list[int]:
    """Return the numbers of the blocks that a row at `position` reads for one KV head.

    Args:
        q: queries of the heads that share it, `[G, D]`.
        keys: keys as the row reads them, `[position + 1, D]`.
    """
    own, most, end = position // BLOCK, kv_read // BLOCK, sealed_end(position + 1)
    if own < most:
        return list(range(own + 1))
    quads = keys.shape[1] // 8
    sizes = np.square(q * _lines(keys, end - 1)[0]).reshape(len(q), 2, quads, 4).sum((1, 3)).max(0)
    best = np.argsort(-sizes, kind="stable")[: -(-quads // 4)]
    channels = np.isin(np.arange(keys.shape[1]) // 4 % quads, best)

    def likely(block: int) -> float:
        half, middle, steps = _lines(keys, block)
        factors = np.where(channels, q * half, 0)
        unit = np.abs(factors).max(1, keepdims=True) / 127
        codes = np.rint(factors / unit)
        return float(((steps @ codes.T).max(0) * unit[:, 0] + q @ middle).max())

    ordered = sorted(range(1, end), key=likely, reverse=True)
    return [0, *sorted(ordered[: most - 3]), own - 1, own]


def _lines(keys: Floats, block: int) -> tuple[Floats, Floats, Floats]:
    """Return half a range, the middle and the odd numbers of each channel of a sealed block, whose
    smallest is -15 and whose largest 15."""
    rows = keys[block * BLOCK : (block + 1) * BLOCK]
    low, high = rows.min(0), rows.max(0)
    half, middle = (high - low) / 30, (low + high) / 2
    return half, middle, np.rint((rows - middle) / np.where(half > 0, half, 1))


def key_row(row: Floats) -> Floats:
    """Round a row to int8 codes."""
    codes, scale = quantize_row(row)
    return codes * np.float64(np.float16(scale))


def value_row(row: Floats, *, bits: int, scales: int) -> Floats:
    """Round the int8 codes of a row to odd numbers, -3 .. 3 or -15 .. 15, and fit their scales."""
    codes, scale = quantize_row(row)
    parts = (fitted(part.astype(np.float64), bits) for part in np.split(codes, scales))
    return np.concatenate([steps * _half(step * np.float64(scale)) for steps, step in parts])


def fitted(numbers: Floats, bits: int) -> tuple[Floats, float]:
    """Return odd numbers and what one of them stands for, the best for them by least squares."""
    size = np.abs(numbers).max() / 16, FIRST_STEP * np.sqrt(np.square(numbers).mean())
    top, first = 2**bits - 1, float(size[bits == 2])
    steps = 2 * np.clip(np.floor(numbers / (2 * first or 1) + (top + 1) / 2), 0, top) - top
    return steps, float(steps @ numbers / (steps @ steps))


def channel(numbers: Floats) -> Floats:
    """Round the numbers `[BLOCK]` of one channel to a line through odd numbers -15 .. 15."""
    low, high = numbers.min(), numbers.max()
    if low == high:
        return np.full(BLOCK, _half(low))
    steps = 2 * np.clip(np.floor((numbers - low) * 15 / (high - low) + 0.5), 0, 15) - 15
    half, middle = np.linalg.lstsq(np.stack((steps, np.ones(BLOCK)), 1), numbers)[0]
    return np.asarray(steps * _half(half) + _half(middle))


def _half(number: float) -> float:
    return float(np.float16(number))
