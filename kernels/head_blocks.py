"""Blocks of a condensed context: each KV head of a layer has its own number of them.

A head keeps the rows of K and V that matter most, packed into full blocks of one KV head. These lie
anywhere in blocks of the pool, whose records are one such block behind the other, and stand in
place of the sequence's first blocks. Keys stay as they are, turned to their positions in the whole
context, and every later row reads them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import indices
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class HeadBlocks:
    """Blocks of a condensed context in one pool.

    Attributes:
        starts: `[layers * kv_heads + 1]`, where the blocks of each layer's heads begin in `places`.
        places: blocks of one KV head, counted in such blocks of the whole pool.
        first: number of the first block of the sequence that is whole.
    """

    starts: Indices
    places: Indices
    first: int

    @property
    def most(self) -> int:
        """Largest number of blocks of a head."""
        return int(np.diff(self.starts).max())

    @property
    def least(self) -> int:
        return int(np.diff(self.starts).min())


def choose_rows(shares: NDArray[np.float32], keep: float) -> list[Indices]:
    """Return the rows that each head keeps, in order: whole blocks of those with most attention.

    Heads share what is kept, so that those whose attention is spread keep more; each has a block
    (KVzip, Kim et al., arXiv:2505.23416).

    Args:
        shares: largest share of the attention that a row had, `[heads, T]`, with T a multiple of
            BLOCK.
        keep: share of all rows that is kept.
    """
    heads = len(shares)
    order = np.argsort(-shares, axis=1, kind="stable")
    ranked = np.take_along_axis(shares, order, axis=1)
    worth = ranked[:, BLOCK // 2 :: BLOCK].copy()  # of each block of rows, the best first
    worth[:, 0] = np.inf
    count = max(heads, round(keep * worth.size))
    best = np.argsort(-worth, axis=None, kind="stable")[:count]
    blocks = np.bincount(best // worth.shape[1], minlength=heads)
    return [np.sort(order[head, : n * BLOCK]) for head, n in enumerate(blocks)]


def head_blocks(
    blocks: KVBlocks, counts: Sequence[int], into: Sequence[int], *, first: int
) -> HeadBlocks:
    """Lay out blocks of heads, so many of each, in blocks of the pool.

    Args:
        into: blocks of the pool, as many as `blocks_for` says.
    """
    each = blocks.layers * blocks.kv_heads
    starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    numbers = np.arange(starts[-1])
    places = np.asarray(into, np.int64)[numbers // each] * each + numbers % each
    return HeadBlocks(starts, places, first)


def whole_blocks(blocks: KVBlocks, ids: Sequence[int], *, first: int) -> HeadBlocks:
    """Have every head read all of some blocks, in place of all before number `first`."""
    each = blocks.layers * blocks.kv_heads
    places = np.asarray(ids, np.int64) * each + np.arange(each)[:, None]
    return HeadBlocks(np.arange(each + 1) * len(ids), places.reshape(-1), first)


def blocks_for(blocks: KVBlocks, counts: Sequence[int]) -> int:
    """Return the blocks of a pool that have room for so many blocks of heads."""
    return -(-sum(counts) // (blocks.layers * blocks.kv_heads))


def copy_rows(
    blocks: KVBlocks, table: Sequence[int], rows: Sequence[Indices], heads: HeadBlocks
) -> None:
    """Copy rows of a sequence to blocks of their heads.

    Args:
        table: the sequence's blocks.
        rows: rows that each layer's heads keep, as many as their blocks have.
    """
    each, sources = blocks.layers * blocks.kv_heads, np.asarray(table, np.int64)
    for head, kept in enumerate(rows):
        targets = heads.places[heads.starts[head] : heads.starts[head + 1]]
        blocks.copy_head_rows(sources[kept // BLOCK] * each + head, kept % BLOCK, targets)


def check_heads(heads: HeadBlocks, blocks: KVBlocks, *, start: int) -> None:
    """Refuse blocks of heads that do not fit a pool, or stand behind a row.

    Args:
        start: position of the first row that reads them.

    Raises:
        ValueError: they are refused.
    """
    if blocks.sealed is not None or blocks.latent or blocks.recent:
        raise ValueError("blocks of heads beside sealed ones, latents or blocks that are left out")
    of_layer, counts = blocks.layers * blocks.kv_heads, np.diff(heads.starts)
    if len(counts) != of_layer or heads.starts[0] or heads.starts[-1] != len(heads.places):
        raise ValueError(f"blocks of {len(counts)} heads; needed are those of {of_layer}")
    indices(heads.places, blocks.count * of_layer, "block of a head")
    if counts.min() < 1 or counts.max() > heads.first or heads.first * BLOCK > start:
        raise ValueError(
            f"{counts.min()} to {counts.max()} blocks of a head in place of {heads.first}, and "
            f"rows from position {start} on"
        )
