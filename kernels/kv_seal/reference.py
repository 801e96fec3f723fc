"""Reference of sealing: one KV head of a full block at a time, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.hadamard import reference as hadamard
from edgellm.kernels.kv_append.reference import quantize_row, quantize_row4, round_trip
from edgellm.kernels.kv_blocks import BLOCK, KVFormat
from edgellm.kernels.sealed_blocks import sealed_end

Floats = NDArray[np.float64]


def sealed_rows(rows: NDArray[np.floating], format: KVFormat, *, key: bool) -> Floats:
    """Return the rows `[BLOCK, Hkv, D]` of a block as attention reads them once it is sealed.

    Args:
        rows: K less the key offset, or V.
        key: whether the rows are keys, not values.
    """
    if not key:
        return hadamard.transform(np.apply_along_axis(value_row, 2, hadamard.transform(rows)))
    held = round_trip(rows, format, key=True)
    return held if format == "k8v4" else np.apply_along_axis(channel, 0, held)


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


def value_row(row: Floats) -> Floats:
    """Round the int8 codes of a row to odd numbers -15 .. 15, and fit their scale."""
    codes, scale = quantize_row(row)
    steps = quantize_row4(codes.astype(np.float64))[0].astype(np.float64)
    return np.asarray(steps * (steps @ codes) / (steps @ steps) * np.float64(scale))


def channel(numbers: Floats) -> Floats:
    """Round the numbers `[BLOCK]` of one channel to a line through odd numbers -15 .. 15."""
    low, high = numbers.min(), numbers.max()
    if low == high:
        return numbers
    steps = 2 * np.clip(np.floor((numbers - low) * 15 / (high - low) + 0.5), 0, 15) - 15
    half, middle = np.linalg.lstsq(np.stack((steps, np.ones(BLOCK)), 1), numbers)[0]
    return np.asarray(steps * half + middle)
