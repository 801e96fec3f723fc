"""Head norms, RoPE, quantization and KV append in C++ (`cpu.h`), on blocks of every format."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import block_ids, check_rope, floats
from edgellm.kernels.kv_append.norms import HeadNorms
from edgellm.kernels.kv_blocks import BlockTable, KVBlocks
from edgellm.kernels.native import KV, Rope, address
from edgellm.kernels.rope import RopeTable


class NormPointers(ctypes.Structure):
    """HeadNorms for C++; the fields are those of call.h, in their order."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("whole", ctypes.c_int32),
        ("after_rope", ctypes.c_int32),
        ("values", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, norms: HeadNorms | None, head_dim: int) -> NormPointers:
        """Point at the weights, which must outlive the structure; null pointers for no norms."""
        if norms is None:
            return cls()
        flags = norms.whole(head_dim), norms.after_rope, norms.values
        return cls(address(norms.q), address(norms.k), norms.epsilon, *flags)


class _Call(ctypes.Structure):
    """Arguments of one call of KV append; the fields are those of call.h, in their order."""

    _fields_ = [
        ("kv", KV),
        ("rope", Rope),
        ("norms", NormPointers),
        ("qkv", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("layer", "heads", "tokens", "start", "threads")),
        ("queries_alone", ctypes.c_int32),
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
    norms: HeadNorms | None = None,
    queries_alone: bool = False,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Append a chunk's K and V to the KV cache; see `append_rotated` in `__init__.py`.

    Args:
        library: the compiled kernels.

    Raises:
        ValueError: rows, layer, norms, block table or RoPE table do not fit.
    """
    tokens, rows, head_dim = qkv.shape
    heads = rows - (0 if queries_alone else 2 * blocks.kv_heads)
    if heads < 0 or not 0 <= layer < blocks.layers:
        raise ValueError(
            f"{rows} rows of layer {layer} on blocks of {blocks.kv_heads} KV heads and "
            f"{blocks.layers} layers"
        )
    source = floats(qkv, (tokens, rows, blocks.head_dim), "qkv")
    if norms is not None:
        norms.check(heads, blocks.kv_heads, head_dim)
    ids = block_ids(table, blocks.count, start=start, tokens=tokens)
    check_rope(rope_table, head_dim, start + tokens)
    q = np.empty((tokens, heads, head_dim), np.float32)
    call = _Call(
        KV.of(blocks, ids),
        Rope.of(rope_table),
        NormPointers.of(norms, head_dim),
        address(source),
        address(q),
        layer,
        heads,
        tokens,
        start,
        threads,
        queries_alone,
    )
    library.edgellm_append(ctypes.byref(call))
    return q
