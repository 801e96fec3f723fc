"""Chunk attention in C++ (`cpu.cpp`), on int8 and float32 blocks."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import BlockTable, KVBlocks
from edgellm.kernels.native import address, fields


class _Call(ctypes.Structure):
    """Arguments of one call; the same fields, in the same order, as in cpu.cpp."""

    _fields_ = fields(
        "k v k_scale v_scale table q out",
        "layers layer kv_heads heads head_dim tokens start window threads decode",
    )


def attend(
    library: ctypes.CDLL,
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
    """See `attend` in `__init__.py`; `library` holds the compiled kernels."""
    tokens, heads, head_dim = q.shape
    queries = np.ascontiguousarray(q)
    ids = np.asarray(table, np.int64)
    out = np.empty(q.shape, np.float32)
    _, layers, kv_heads, _, _ = blocks.k.shape
    call = _Call(
        address(blocks.k),
        address(blocks.v),
        address(blocks.k_scale),
        address(blocks.v_scale),
        address(ids),
        address(queries),
        address(out),
        layers,
        layer,
        kv_heads,
        heads,
        head_dim,
        tokens,
        start,
        window or 0,
        threads,
        decode,
    )
    library.edgellm_attend(ctypes.byref(call))
    return out
