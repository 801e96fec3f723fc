"""Storage of the KV cache: fixed-size blocks in one pool, one table of block ids a sequence.

    k                 [blocks, layers, kv_heads, BLOCK/16, head_dim/4, 16, 4]  int8, f16 or f32
    v                 [blocks, layers, kv_heads, BLOCK/4, head_dim, 4]
    k_scale, v_scale  [blocks, layers, kv_heads, BLOCK]                        f32, int8 format only

A block is one contiguous record over all layers, so that it can be written to disk or sent to a
device as it is. Four dimensions of a key lie side by side, and four tokens of a value: a score sums
over dimensions and an output over tokens, and the processors' dot products of bytes take four at a
time. Sixteen keys share a panel, so that attention reads memory from front to back.

The int8 format is symmetric with one scale per token and KV head: `value = code * scale`,
`scale = max|value| / 127`. K is stored after RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

BLOCK = 128
QUAD = 4
PANEL = 16

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

    @property
    def layers(self) -> int:
        return int(self.k.shape[1])

    @property
    def kv_heads(self) -> int:
        return int(self.k.shape[2])

    @property
    def head_dim(self) -> int:
        return int(self.v.shape[4])

    def key_rows(self, block: int, layer: int, row: int) -> NDArray[Any]:
        """K of one token as it is stored, `[Hkv, D]`."""
        quads = self.k[block, layer, :, row // PANEL, :, row % PANEL]
        return quads.reshape(self.kv_heads, self.head_dim)

    def value_rows(self, block: int, layer: int, row: int) -> NDArray[Any]:
        """V of one token as it is stored, `[Hkv, D]`."""
        return self.v[block, layer, :, row // QUAD, :, row % QUAD]

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` tokens of block `source` into block `target`, in all layers."""
        panels, quads = -(-rows // PANEL), -(-rows // QUAD)
        self.k[target, :, :, :panels] = self.k[source, :, :, :panels]
        self.v[target, :, :, :quads] = self.v[source, :, :, :quads]
        for scale in (self.k_scale, self.v_scale):
            if scale is not None:
                scale[target, :, :, :rows] = scale[source, :, :, :rows]

    def write(
        self,
        table: BlockTable,
        layer: int,
        start: int,
        k: NDArray[Any],
        v: NDArray[Any],
    ) -> None:
        """Put rows `[C, Hkv, D]`, as the format stores them, at positions `start .. start + C`."""
        ids, rows = slots(table, start, k.shape[0])
        quads = k.reshape(*k.shape[:2], self.head_dim // QUAD, QUAD)
        self.k[ids, layer, :, rows // PANEL, :, rows % PANEL] = quads
        self.v[ids, layer, :, rows // QUAD, :, rows % QUAD] = v

    def read(
        self, table: BlockTable, layer: int, heads: slice, length: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of positions `0 .. length` as they are stored, each `[h, length, D]`."""
        ids = np.asarray(table[: -(-length // BLOCK)], np.intp)
        # [h, blocks, BLOCK/16, 16, D/4, 4] and [h, blocks, BLOCK/4, 4, D]
        k = self.k[ids, layer, heads].transpose(1, 0, 2, 4, 3, 5)
        v = self.v[ids, layer, heads].transpose(1, 0, 2, 4, 3)
        count, head_dim = k.shape[0], self.head_dim
        return (
            k.reshape(count, -1, head_dim)[:, :length],
            v.reshape(count, -1, head_dim)[:, :length],
        )


def allocate(
    *, format: KVFormat, blocks: int, layers: int, kv_heads: int, head_dim: int
) -> KVBlocks:
    """A pool of `blocks` blocks. The pages are not touched: memory grows as blocks are written.

    `head_dim` is a multiple of 4.
    """
    dtype = _DTYPES[format]
    k = np.empty((blocks, layers, kv_heads, BLOCK // PANEL, head_dim // QUAD, PANEL, QUAD), dtype)
    v = np.empty((blocks, layers, kv_heads, BLOCK // QUAD, head_dim, QUAD), dtype)
    scales: list[NDArray[np.float32] | None] = [None, None]
    if format == "int8":
        scales = [np.empty((blocks, layers, kv_heads, BLOCK), np.float32) for _ in scales]
    return KVBlocks(format, k, v, *scales)


def block_bytes(*, format: KVFormat, layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one block (BLOCK tokens, K and V, all layers)."""
    row = head_dim * np.dtype(_DTYPES[format]).itemsize + (4 if format == "int8" else 0)
    return 2 * layers * kv_heads * BLOCK * row


def slots(table: BlockTable, start: int, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Block id and row, each `[count]`, of the tokens at positions `start .. start + count`."""
    positions = np.arange(start, start + count)
    return np.asarray(table, np.intp)[positions // BLOCK], positions % BLOCK
