"""RoPE, quantization and append in C++ (`cpu.cpp`), on int8 and float32 blocks."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.kv_blocks import BlockTable, KVBlocks
from edgellm.kernels.native import address, fields
from edgellm.kernels.rope import RopeTable


class _Call(ctypes.Structure):
    """Arguments of one call; the same fields, in the same order, as in cpu.cpp."""

    _fields_ = fields(
        "k v k_scale v_scale table qkv cos sin q",
        "layers layer kv_heads heads head_dim half tokens start threads",
    )


def append_rotated(
    library: ctypes.CDLL,
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    start: int,
    qkv: NDArray[np.float32],
    rope_table: RopeTable,
    *,
    threads: int = 1,
) -> NDArray[np.float32]:
    """See `append_rotated` in `__init__.py`; `library` holds the compiled kernels."""
    tokens, rows, head_dim = qkv.shape
    _, layers, kv_heads, _, _ = blocks.k.shape
    heads = rows - 2 * kv_heads
    source = np.ascontiguousarray(qkv)
    ids = np.asarray(table, np.int64)
    q = np.empty((tokens, heads, head_dim), np.float32)
    call = _Call(
        address(blocks.k),
        address(blocks.v),
        address(blocks.k_scale),
        address(blocks.v_scale),
        address(ids),
        address(source),
        address(rope_table.cos),
        address(rope_table.sin),
        address(q),
        layers,
        layer,
        kv_heads,
        heads,
        head_dim,
        rope_table.cos.shape[1],
        tokens,
        start,
        threads,
    )
    library.edgellm_append(ctypes.byref(call))
    return q
