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
    scale: float | None = None,
    softcap: float | None = None,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Softmax(scale q k^T) v over the cached tokens `0 .. start + C`, C of them just appended.

    Runs in C++ where that was built, else in numpy. In C++ a query's result has the same bits
    however many others come with it, and on int8 blocks queries and weights are rounded as well
    (see cpu.h).

    Args:
        blocks, table: the pool and the sequence's block ids.
        q: queries after RoPE, `[C, H, D]` float32, at positions `start ..`.
        window: a query sees its own and the `window - 1` positions before it, or all if None.
        scale: of the scores; None is `D ** -0.5`.
        softcap: scores `s` become `softcap * tanh(s / softcap)`, if any.
        threads: cores that the C++ version may use.

    Returns:
        `[C, H, D]` float32.
    """
    compiled = library_for(blocks)
    if compiled is None:
        return portable.attend(
            blocks, table, layer, q, start, window=window, scale=scale, softcap=softcap
        )
    return native.attend(
        compiled,
        blocks,
        table,
        layer,
        q,
        start,
        window=window,
        scale=scale,
        softcap=softcap,
        threads=threads,
    )
