"""Causal attention of a chunk of queries over the KV blocks of one sequence (GQA)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.attention import native, portable
from edgellm.kernels.kv_blocks import BlockTable, KVBlocks
from edgellm.kernels.native import library_for

__all__ = ["attend"]


def attend(
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    q: NDArray[np.float32],
    start: int,
    *,
    window: int | None = None,
    threads: int = 1,
    decode: bool = False,
) -> NDArray[np.float32]:
    """Softmax(q k^T / sqrt(D)) v over the cached tokens `0 .. start + C`, C of them just appended.

    Runs in C++ where that was built and knows the format, else in numpy.

    Args:
        blocks, table: the pool and the sequence's block ids.
        q: queries after RoPE, `[C, H, D]` float32, at positions `start ..`.
        window: a query sees its own and the `window - 1` positions before it, or all if None.
        threads: cores that the C++ version may use.
        decode: sum in the order that is fastest for one token; otherwise the C++ version gives a
            query the same bits however many others come with it.

    Returns:
        `[C, H, D]` float32.
    """
    compiled = library_for(blocks.format)
    if compiled is None:
        return portable.attend(blocks, table, layer, q, start, window=window)
    return native.attend(
        compiled, blocks, table, layer, q, start, window=window, threads=threads, decode=decode
    )
