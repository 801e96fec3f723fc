"""Storage of the KV cache: fixed-size blocks in a pool, and a table of block ids per sequence.

    k                 [blocks, layers, kv_heads, BLOCK/16, head_dim/4, 16, 4]  int8, f16 or f32
    v                 [blocks, layers, kv_heads, BLOCK/4, head_dim, 4]
    k_scale, v_scale  [blocks, layers, kv_heads, BLOCK]                        f32; none for floats
    key_offset        [layers, kv_heads, head_dim]                             f32, or none

A block is one contiguous record over all layers of the pool, so that it can be written to disk or
sent to a device as it is. Four dimensions of a key lie side by side, and four tokens of a value: a
score sums over dimensions and an output over tokens, and the processors' dot products of bytes take
four at a time. Sixteen keys share a panel, so that attention reads memory from front to back.

K is stored after RoPE and less `key_offset`, if the model has one. A vector subtracted from all
keys changes each query's scores by one number, and so no softmax. It is a part that all keys have
in common, so smaller numbers are left to round (see `edgellm/store/key_basis.py`). A row is a
token's `head_dim` numbers of one KV head. An int8 row has one scale, max|number| / 127; its numbers
are code * scale, of a key after the Hadamard transform (`hadamard/`). The largest number of a key
is far larger than most; those of V are nearly alike.

Formats that seal blocks, such as k4v4, have int8 rows whose V went through the transform as well;
`sealed_blocks.py` has what becomes of them.

A model with latents has them in place of V. A latent is a part of its token's key as well, behind
the part that RoPE turns, which K holds.
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

# In the order of `Format` in cpu/kv_blocks.h.
KVFormat = Literal["int8", "f16", "f32", "k8v4", "k4v4", "k4v2"]


@dataclass(frozen=True)
class Sealing:
    """Bits of a number in sealed blocks."""

    key_bits: int
    value_bits: int

    @property
    def channels(self) -> bool:
        """Whether keys have a scale for each channel of a block, not for each row."""
        return self.key_bits < 8

    @property
    def value_scales(self) -> int:
        """Number of scales of a row of V, each for as many numbers."""
        return 2 if self.value_bits == 2 else 1


KV_FORMATS: tuple[KVFormat, ...] = get_args(KVFormat)
# Formats that seal full blocks, and those that keep all rows as they are.
SEALINGS: dict[KVFormat, Sealing] = {
    "k8v4": Sealing(8, 4),
    "k4v4": Sealing(4, 4),
    "k4v2": Sealing(4, 2),
}
SEALED = tuple(SEALINGS)
ROW_FORMATS = tuple(name for name in KV_FORMATS if name not in SEALED)
# A format, or the one of each layer that attends to all positions, which all seal blocks.
KVFormats = KVFormat | tuple[KVFormat, ...]
# Formats whose rows have scales, and the type of the numbers of each.
SCALED: tuple[KVFormat, ...] = ("int8", *SEALED)
DTYPES = {name: np.dtype({"f16": "f2", "f32": "f4"}.get(name, "i1")) for name in KV_FORMATS}
# Where blocks of queries read a share of the attention (`attention/heavy_panels.h`): the format,
# the first position, and the smallest share.
MASS_FORMAT, DENSE_POSITIONS, LEAST_MASS = "int8", 4096, 0.01
# Version of the meaning of a block's bytes: blocks kept under another version are not read.
LAYOUT_VERSION = 4

BlockTable = Sequence[int]


def seals(format: KVFormats) -> bool:
    return isinstance(format, tuple) or format in SEALED


def formats_of(format: KVFormats) -> tuple[KVFormat, ...]:
    return format if isinstance(format, tuple) else (format,)


def format_text(format: KVFormats) -> str:
    """Return the name of a format; of several, how many layers have each."""
    if not isinstance(format, tuple):
        return format
    return ", ".join(f"{name} in {format.count(name)}" for name in SEALED if name in format)


def first_dense(start: int, end: int) -> int:
    """Return the first of positions `start` to `end` of a prompt, from `DENSE_POSITIONS` on, whose
    block is not whole among them, so that it reads all; `end`: none.

    See `sparse_blocks` in `attention/call.h`.
    """
    if start > DENSE_POSITIONS and start % BLOCK:
        return start
    return min(end, max(start, DENSE_POSITIONS, end // BLOCK * BLOCK))


@dataclass(frozen=True)
class SealedBlocks:
    """A pool of sealed blocks, with the methods of `KVBlocks` that do not know of tokens.

    `sealed_blocks.py` has their layout.
    """

    k: NDArray[np.uint8]
    v: NDArray[np.uint8]
    k_scale: NDArray[np.float16]
    v_scale: NDArray[np.float16]

    @property
    def count(self) -> int:
        return int(self.k.shape[0])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.k, self.v, self.k_scale, self.v_scale

    @property
    def nbytes(self) -> int:
        """Memory of the pool when every block is in use."""
        return sum(array.nbytes for array in self.arrays)

    def clear(self, table: BlockTable) -> None:
        """Fill blocks with zeros, which gives them memory; pages of a new pool have none yet."""
        for array in self.arrays:
            array[list(table)] = 0

    def block(self, block: int) -> list[NDArray[Any]]:
        return [array[block] for array in self.arrays]

    def first_rows(self, block: int, rows: int) -> list[NDArray[Any]]:
        """Copy a block, which is whole or not there."""
        return [array.copy() for array in self.block(block)]

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy block `source` into block `target`."""
        for array in self.arrays:
            array[target] = array[source]


@dataclass(frozen=True)
class KVBlocks:
    """Arrays of one pool of KV blocks. `k_scale` and `v_scale` are None for float formats.

    `key_offset` belongs to the model, and is not among `arrays`, nor are the sealed blocks of the
    same layers. `latent` is the width of latents in place of V, or 0. `recent` is the number of
    last blocks that a row sees beside the first one, its own among them, in C++ alone; 0: all.
    Methods take and return rows as the numbers that a scale multiplies: int8 codes, or floats.
    """

    format: KVFormat
    k: NDArray[Any]
    v: NDArray[Any]
    k_scale: NDArray[np.float32] | None
    v_scale: NDArray[np.float32] | None
    key_offset: NDArray[np.float32] | None = None
    latent: int = 0
    sealed: SealedBlocks | None = None
    recent: int = 0

    @property
    def count(self) -> int:
        return int(self.k.shape[0])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Arrays of K, V and their scales if any; the first dimension counts blocks."""
        every = (self.k, self.v, self.k_scale, self.v_scale)
        return tuple(array for array in every if array is not None)

    @property
    def nbytes(self) -> int:
        """Memory of the pool when every block is in use."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def layers(self) -> int:
        return int(self.k.shape[1])

    @property
    def kv_heads(self) -> int:
        return int(self.k.shape[2])

    @property
    def head_dim(self) -> int:
        return QUAD * int(self.k.shape[4])

    @property
    def value_dim(self) -> int:
        """Width of a row of V, which may be a latent."""
        return self.latent or self.head_dim

    def key_rows(self, block: int, layer: int, row: int) -> NDArray[Any]:
        """Return K of the token in a row of a block, `[Hkv, D]`."""
        quads = self.k[block, layer, :, row // PANEL, :, row % PANEL]
        return quads.reshape(self.kv_heads, -1)

    def value_rows(self, block: int, layer: int, row: int) -> NDArray[Any]:
        """Return V of the token in a row of a block, `[Hkv, D]`."""
        return self.v[block, layer, :, row // QUAD, :, row % QUAD]

    def clear(self, table: BlockTable) -> None:
        """Fill blocks with zeros, which gives them memory; pages of a new pool have none yet."""
        for array in self.arrays:
            array[list(table)] = 0

    def block(self, block: int) -> list[NDArray[Any]]:
        """Return the part of each array that belongs to one block."""
        return [array[block] for array in self.arrays]

    def first_rows(self, block: int, rows: int) -> list[NDArray[Any]]:
        """Copy a block, with zeros in place of all but its first `rows` tokens."""
        whole = [array.copy() for array in self.block(block)]
        panel, quad = rows // PANEL, rows // QUAD
        k, v, *scales = whole
        k[:, :, panel + 1 :] = 0
        k[:, :, panel : panel + 1, :, rows % PANEL :] = 0
        v[:, :, quad + 1 :] = 0
        v[:, :, quad : quad + 1, :, rows % QUAD :] = 0
        for scale in scales:
            scale[:, :, rows:] = 0
        return whole

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` tokens of block `source` into block `target`, in all layers."""
        panels, quads = -(-rows // PANEL), -(-rows // QUAD)
        self.k[target, :, :, :panels] = self.k[source, :, :, :panels]
        self.v[target, :, :, :quads] = self.v[source, :, :, :quads]
        for scale in (self.k_scale, self.v_scale):
            if scale is not None:
                scale[target, :, :, :rows] = scale[source, :, :, :rows]

    def copy_head_rows(
        self, sources: NDArray[np.int64], rows: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> None:
        """Copy rows of one KV head into whole blocks of one head.

        Args:
            sources, rows: block of each row, and its place there.
            targets: blocks that they fill; all are counted in blocks of one KV head.
        """
        to, at = np.repeat(targets, BLOCK), np.tile(np.arange(BLOCK), len(targets))
        for array, size in ((self.k, PANEL), (self.v, QUAD)):
            of_heads = array.reshape(-1, *array.shape[3:])
            copied = of_heads[sources, rows // size, :, rows % size]
            of_heads[to, at // size, :, at % size] = copied
        for scale in (self.k_scale, self.v_scale):
            if scale is not None:
                of_heads = scale.reshape(-1, BLOCK)
                of_heads[to, at] = of_heads[sources, rows]

    def write(
        self,
        table: BlockTable,
        layer: int,
        start: int,
        k: NDArray[Any],
        v: NDArray[Any],
    ) -> None:
        """Write rows `[C, Hkv, D]` of K and V at positions `start .. start + C` of a sequence."""
        ids, rows = slots(table, start, k.shape[0])
        quads = k.reshape(*k.shape[:2], k.shape[2] // QUAD, QUAD)
        self.k[ids, layer, :, rows // PANEL, :, rows % PANEL] = quads
        self.v[ids, layer, :, rows // QUAD, :, rows % QUAD] = v

    def read(
        self, table: BlockTable, layer: int, heads: slice, length: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return K and V of positions `0 .. length` of a sequence, each `[h, length, D]`."""
        ids = np.asarray(table[: -(-length // BLOCK)], np.intp)
        # [h, blocks, BLOCK/16, 16, D/4, 4] and [h, blocks, BLOCK/4, 4, D]
        k = self.k[ids, layer, heads].transpose(1, 0, 2, 4, 3, 5)
        v = self.v[ids, layer, heads].transpose(1, 0, 2, 4, 3)
        return (
            k.reshape(k.shape[0], -1, self.head_dim)[:, :length],
            v.reshape(v.shape[0], -1, self.value_dim)[:, :length],
        )


@dataclass(frozen=True)
class KVView:
    """Blocks of one sequence in a pool.

    Positions before the window of every layer are never read, and may have any block in `table`.
    `sealed` has the ids of its sealed blocks, where blocks are sealed.
    """

    blocks: KVBlocks
    table: BlockTable
    sealed: BlockTable = ()


def allocate(
    *,
    format: KVFormat,
    blocks: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    key_offset: NDArray[np.float32] | None = None,
    latent: int = 0,
    sealed: SealedBlocks | None = None,
    recent: int = 0,
) -> KVBlocks:
    """Allocate a pool of KV blocks; pages are not touched, so memory grows as blocks are written.

    Args:
        blocks: number of blocks.
        head_dim: multiple of 4.
        key_offset: `[layers, kv_heads, head_dim]` float32, or None.
        latent: width of latents in place of V; 0: V has heads of `head_dim`.
        sealed: sealed blocks of the same layers.
        recent: number of last blocks that a row sees beside the first one; 0: all.

    Raises:
        ValueError: `key_offset` has another dtype or shape, or a format that seals blocks has
            recent ones alone.
    """
    if recent and format in SEALED:
        raise ValueError(
            f"{format} with {recent} recent blocks; needed is a format without sealing"
        )
    if key_offset is not None:
        shape = layers, kv_heads, head_dim
        if key_offset.dtype != np.float32 or key_offset.shape != shape:
            raise ValueError(
                f"key_offset is float32 {shape}, not {key_offset.dtype} {key_offset.shape}"
            )
        key_offset = np.ascontiguousarray(key_offset)
    dtype = DTYPES[format]
    k = np.empty((blocks, layers, kv_heads, BLOCK // PANEL, head_dim // QUAD, PANEL, QUAD), dtype)
    v = np.empty((blocks, layers, kv_heads, BLOCK // QUAD, latent or head_dim, QUAD), dtype)
    k_scale = v_scale = None
    if format in SCALED:
        k_scale, v_scale = (
            np.empty((blocks, layers, kv_heads, BLOCK), np.float32) for _ in range(2)
        )
    return KVBlocks(format, k, v, k_scale, v_scale, key_offset, latent, sealed, recent)


def block_bytes(
    *, format: KVFormat, layers: int, kv_heads: int, head_dim: int, latent: int = 0
) -> int:
    """Return the size of one block in bytes: BLOCK tokens, K and V, all layers."""
    numbers = (head_dim + (latent or head_dim)) * DTYPES[format].itemsize
    return layers * kv_heads * BLOCK * (numbers + (8 if format in SCALED else 0))


def slots(table: BlockTable, start: int, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return block id and row, each `[count]`, of the tokens at `start .. start + count`."""
    positions = np.arange(start, start + count)
    return np.asarray(table, np.intp)[positions // BLOCK], positions % BLOCK
