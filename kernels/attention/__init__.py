"""Causal attention of a chunk of queries over the KV blocks of one sequence (GQA)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.attention import native, portable
from edgellm.kernels.kv_blocks import SEALED, BlockTable, KVBlocks
from edgellm.kernels.native import library_for

__all__ = ["attend"]


def attend(
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    q: NDArray[np.float32],
    start: int,
    *,
    sealed: BlockTable = (),
    window: int | None = None,
    kv_read: int | None = None,
    prefill_mass: float | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Compute softmax(scale q k^T) v over cached tokens `0 .. start + C`, C of them just appended.

    The kernel is C++ where it was built, else numpy. In C++ the result of a query has the same bits
    with any number of other queries, and on int8 blocks queries and weights are rounded too (see
    cpu.h).

    Args:
        blocks, table: pool, and block ids of the sequence.
        sealed: ids of its sealed blocks, of formats that have some.
        q: queries after RoPE, `[C, H, D]` float32, at positions `start ..`.
        window: number of positions that a query sees, its own included; None: all positions.
        kv_read: tokens that a query reads at most, in whole blocks, see `sealed_blocks.py`; None:
            all that it sees.
        prefill_mass: share of the attention, about, that each head reads at a whole block of
            queries from position 4,096 on in C++, above 0, of int8 blocks; None: all.
        scale: factor of the scores; None is `D ** -0.5`.
        softcap: soft cap, if any: scores `s` become `softcap * tanh(s / softcap)`.
        sinks: for each head a score without key and value, `[H]`, as it enters the softmax.
        threads: number of cores for the C++ kernel.

    Returns:
        `[C, H, D]` float32.

    Raises:
        ValueError: the blocks are for C++, which was not built.
    """
    compiled = library_for(blocks)
    if compiled is None and (blocks.format in SEALED or blocks.recent):
        raise ValueError(f"{blocks.format} without C++ kernels; needed is another format")
    if compiled is None:
        return portable.attend(
            blocks, table, layer, q, start, window=window, scale=scale, softcap=softcap, sinks=sinks
        )
    return native.attend(
        compiled,
        blocks,
        table,
        layer,
        q,
        start,
        sealed=sealed,
        window=window,
        kv_read=kv_read,
        prefill_mass=prefill_mass,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        threads=threads,
    )
