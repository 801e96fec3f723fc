"""Rotate, quantize and write the K and V rows of a chunk into a sequence's blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_append import native, portable
from edgellm.kernels.kv_append.norms import HeadNorms
from edgellm.kernels.kv_append.portable import append
from edgellm.kernels.kv_blocks import BlockTable, KVBlocks
from edgellm.kernels.native import library_for
from edgellm.kernels.rope import RopeTable

__all__ = ["HeadNorms", "append", "append_rotated"]


def append_rotated(
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    start: int,
    qkv: NDArray[np.float32],
    rope_table: RopeTable,
    *,
    norms: HeadNorms | None = None,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Normalize Q and K and apply RoPE, write K and V at positions `start ..`, and give Q back.

    Runs in C++ where that was built, else in numpy.

    Args:
        blocks, table: the pool and the sequence's block ids.
        qkv: `[C, H + 2 Hkv, D]` float32: all query heads, then K, then V.
        norms: of Q and K, if any.
        threads: cores that the C++ version may use.

    Returns:
        The rotated queries, `[C, H, D]` float32.
    """
    compiled = library_for(blocks)
    if compiled is None:
        return portable.append_rotated(blocks, table, layer, start, qkv, rope_table, norms=norms)
    return native.append_rotated(
        compiled, blocks, table, layer, start, qkv, rope_table, norms=norms, threads=threads
    )
