"""Attention of a chunk in C++ (`cpu.h`), on KV blocks of every format."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import block_ids, check_reads, floats, sealed_ids
from edgellm.kernels.head_blocks import HeadBlocks, check_heads
from edgellm.kernels.kv_blocks import SEALED, BlockTable, KVBlocks
from edgellm.kernels.native import KV, address


class _Call(ctypes.Structure):
    """Arguments of one call of attention; the fields are those of call.h, in their order."""

    _fields_ = [
        ("kv", KV),
        ("q", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("heads", "tokens", "start", "window", "kv_read")),
        *((name, ctypes.c_float) for name in ("mass", "scale", "softcap")),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("layer", "threads")),
    ]


def attend(
    library: ctypes.CDLL,
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
    condensed: HeadBlocks | None = None,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Attend over the KV blocks of a sequence; see `attend` in `__init__.py`.

    Args:
        library: the compiled kernels.
        condensed: blocks of KV heads in place of the first ones.

    Raises:
        ValueError: heads, layer, queries, block table or what is read of it do not fit the pool.
    """
    tokens, heads, _ = q.shape
    if heads % blocks.kv_heads or not 0 <= layer < blocks.layers:
        raise ValueError(
            f"{heads} heads of layer {layer} on blocks of {blocks.kv_heads} KV heads and "
            f"{blocks.layers} layers"
        )
    of_heads = None if sinks is None else floats(sinks, (heads,), "sinks")
    queries = floats(q, (tokens, heads, blocks.head_dim + blocks.latent), "q")
    ids = block_ids(table, blocks.count, start=start, tokens=tokens)
    into = None
    if blocks.sealed is not None:
        into = sealed_ids(sealed, blocks.sealed, tokens=start + tokens)
    elif blocks.format in SEALED:
        raise ValueError(f"{blocks.format} without sealed blocks; needed is a pool of them")
    if window and (kv_read or prefill_mass or blocks.recent or condensed):
        raise ValueError(f"a window of {window} and blocks that are left out; only one is allowed")
    if condensed is not None and prefill_mass:
        raise ValueError("a share of the attention on a condensed context; needed is a whole one")
    if condensed is not None:
        check_heads(condensed, blocks, start=start)
    check_reads(blocks, heads, kv_read, prefill_mass)
    out = np.empty((tokens, heads, blocks.latent or blocks.head_dim), np.float32)
    call = _Call(
        KV.of(blocks, ids, into, heads=condensed),
        address(queries),
        heads,
        tokens,
        start,
        window or 0,
        kv_read or 0,
        prefill_mass or 0.0,
        blocks.head_dim**-0.5 if scale is None else scale,
        softcap or 0.0,
        address(of_heads),
        address(out),
        layer,
        threads,
    )
    library.edgellm_attend(ctypes.byref(call))
    return out
