"""RoPE, quantization and append in C++ (`cpu.h`), on blocks of every format."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import block_ids, check_rope, floats
from edgellm.kernels.kv_blocks import BlockTable, KVBlocks
from edgellm.kernels.native import KV, Rope, address
from edgellm.kernels.rope import RopeTable


class _Call(ctypes.Structure):
    """Arguments of one call; the same fields, in the same order, as in call.h."""

    _fields_ = [
        ("kv", KV),
        ("rope", Rope),
        ("qkv", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("layer", "heads", "tokens", "start", "threads")),
    ]


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
    heads = rows - 2 * blocks.kv_heads
    if heads < 0 or not 0 <= layer < blocks.layers:
        raise ValueError(
            f"{rows} rows of layer {layer} on blocks of {blocks.kv_heads} KV heads and "
            f"{blocks.layers} layers"
        )
    source = floats(qkv, (tokens, rows, blocks.head_dim), "qkv")
    ids = block_ids(table, blocks.count, start=start, tokens=tokens)
    check_rope(rope_table, head_dim, start + tokens)
    q = np.empty((tokens, heads, head_dim), np.float32)
    call = _Call(
        KV.of(blocks, ids),
        Rope.of(rope_table),
        address(source),
        address(q),
        layer,
        heads,
        tokens,
        start,
        threads,
    )
    library.edgellm_append(ctypes.byref(call))
    return q
