"""Storage of the KV cache: fixed-size blocks in one pool, one table of block ids a sequence.

    k, v              [blocks, layers, kv_heads, BLOCK, head_dim]   int8, float16 or float32
    k_scale, v_scale  [blocks, layers, kv_heads, BLOCK]             float32, int8 format only

A block is one contiguous record over all layers, so that it can be written to disk or sent to a
device as it is. The int8 format is symmetric with one scale per token and KV head:
`value = code * scale`, `scale = max|value| / 127`. K is stored after RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

BLOCK = 128

KVFormat = Literal["int8", "f16", "f32"]
KV_FORMATS: tuple[str, ...] = get_args(KVFormat)
_DTYPES: dict[KVFormat, type[np.generic]] = {
    "int8": np.int8,
    "f16": np.float16,
    "f32": np.float32,
}

BlockTable = Sequence[int]


@dataclass(frozen=True)
class KVBlocks:
    """The arrays of one pool. `k_scale` and `v_scale` are None unless `format` is int8."""

    format: KVFormat
    k: NDArray[Any]
    v: NDArray[Any]
    k_scale: NDArray[np.float32] | None
    v_scale: NDArray[np.float32] | None

    @property
    def count(self) -> int:
        return int(self.k.shape[0])

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` tokens of block `source` into block `target`, in all layers."""
        for array in (self.k, self.v, self.k_scale, self.v_scale):
            if array is not None:
                array[target, :, :, :rows] = array[source, :, :, :rows]


def allocate(
    *, format: KVFormat, blocks: int, layers: int, kv_heads: int, head_dim: int
) -> KVBlocks:
    """A pool of `blocks` blocks. The pages are not touched: memory grows as blocks are written."""
    shape = (blocks, layers, kv_heads, BLOCK, head_dim)
    dtype = _DTYPES[format]
    scales: list[NDArray[np.float32] | None] = [None, None]
    if format == "int8":
        scales = [np.empty(shape[:-1], np.float32) for _ in scales]
    return KVBlocks(format, np.empty(shape, dtype), np.empty(shape, dtype), *scales)


def block_bytes(*, format: KVFormat, layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one block (BLOCK tokens, K and V, all layers)."""
    row = head_dim * np.dtype(_DTYPES[format]).itemsize + (4 if format == "int8" else 0)
    return 2 * layers * kv_heads * BLOCK * row


def slots(table: BlockTable, start: int, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Block id and row, each `[count]`, of the tokens at positions `start .. start + count`."""
    positions = np.arange(start, start + count)
    return np.asarray(table, np.intp)[positions // BLOCK], positions % BLOCK
