"""KV append: norms, RoPE, quantization and writing of a chunk's K and V to a sequence's blocks."""

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
    queries_alone: bool = False,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Normalize Q and K, apply RoPE, write K and V at positions `start ..`, and return Q.

    The kernel is C++ where it was built, else numpy.

    Args:
        blocks, table: pool, and block ids of the sequence.
        qkv: `[C, H + 2 Hkv, D]` float32: all query heads, then K, then V.
        norms: norms of Q and K, if any.
        queries_alone: whether the layer reads K and V of another one, so that `qkv` has its queries
            `[C, H, D]` and nothing is written.
        threads: number of cores for the C++ kernel.

    Returns:
        Rotated queries, `[C, H, D]` float32.
    """
    compiled = library_for(blocks)
    if compiled is None:
        return portable.append_rotated(
            blocks,
            table,
            layer,
            start,
            qkv,
            rope_table,
            norms=norms,
            queries_alone=queries_alone,
        )
    return native.append_rotated(
        compiled,
        blocks,
        table,
        layer,
        start,
        qkv,
        rope_table,
        norms=norms,
        queries_alone=queries_alone,
        threads=threads,
    )
