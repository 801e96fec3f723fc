"""Reference of the rounding in the KV cache: one token and KV head at a time, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.hadamard import reference as hadamard
from edgellm.kernels.kv_blocks import SCALED, SEALED, KVFormat


def quantize_row(row: NDArray[np.floating]) -> tuple[NDArray[np.int8], np.float32]:
    """Quantize a row `[D]` to int8 codes and their scale; an all-zero row has scale 0."""
    scale = np.float32(np.max(np.abs(row)) / 127)
    if scale == 0:
        return np.zeros(row.shape, np.int8), scale
    return np.rint(row.astype(np.float64) / np.float64(scale)).astype(np.int8), scale


def round_trip(rows: NDArray[np.floating], format: KVFormat, *, key: bool) -> NDArray[np.float64]:
    """Return rows `[C, Hkv, D]` as attention reads them back from the KV cache.

    Args:
        key: whether the rows are keys, not values.
    """
    if format not in SCALED:
        return rows.astype(np.float16 if format == "f16" else np.float32).astype(np.float64)
    spread = key or format in SEALED
    if spread:
        rows = hadamard.transform(rows)
    out = np.empty(rows.shape, np.float64)
    for token in range(rows.shape[0]):
        for head in range(rows.shape[1]):
            codes, scale = quantize_row(rows[token, head])
            out[token, head] = codes * np.float64(scale)
    return hadamard.transform(out) if spread else out
