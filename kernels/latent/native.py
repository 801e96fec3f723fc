"""Weights around latents as C++ reads them, and the append of latents by itself."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import block_ids, check_rope, floats
from edgellm.kernels.kv_blocks import BlockTable, KVBlocks
from edgellm.kernels.latent.weights import LatentWeights
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.native import KV, Rope, address
from edgellm.kernels.rope import RopeTable


class LatentLayer(ctypes.Structure):
    """Weights around latents; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, LinearLayer) for name in ("query_down", "key_up", "value_up")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "norm")),
        ("epsilon", ctypes.c_float),
    ]

    @classmethod
    def of(cls, weights: LatentWeights | None) -> LatentLayer:
        """Point at the weights, which must outlive the structure."""
        if weights is None:
            return cls()
        linears = weights.query_down, weights.key_up, weights.value_up
        norms = weights.query_norm, weights.norm
        return cls(*map(layer_of, linears), *map(address, norms), weights.epsilon)


class _AppendCall(ctypes.Structure):
    """Arguments of one append; the fields are those of call.h, in their order."""

    _fields_ = [
        ("kv", KV),
        ("rope", Rope),
        *((name, ctypes.c_void_p) for name in ("norm", "rows", "q")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("layer", "heads", "tokens", "start", "threads")),
    ]


def append_latents(
    library: ctypes.CDLL,
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    start: int,
    rows: NDArray[np.float32],
    rope_table: RopeTable,
    *,
    norm: NDArray[np.float32],
    epsilon: float,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Apply RoPE, write keys and normalized latents at positions `start ..`, and return queries.

    Args:
        blocks, table: pool, and block ids of the sequence.
        rows: `[C, (H + 1) * (D + rank)]` float32: for each head what RoPE turns and its product
            with `key_up`, then the key and the latent.
        norm: weight of the norm of latents, `[rank]`.

    Returns:
        Queries `[C, H, D + rank]` float32, as attention reads them.

    Raises:
        ValueError: rows, layer, norm, block table or RoPE table do not fit the pool.
    """
    tokens, width = len(rows), blocks.head_dim + blocks.latent
    heads = rows.shape[1] // width - 1
    if not blocks.latent or heads < 1 or not 0 <= layer < blocks.layers:
        raise ValueError(
            f"{heads} heads of layer {layer} on blocks with latents of {blocks.latent} numbers and "
            f"{blocks.layers} layers"
        )
    source = floats(rows, (tokens, (heads + 1) * width), "rows")
    weight = floats(norm, (blocks.latent,), "norm")
    ids = block_ids(table, blocks.count, start=start, tokens=tokens)
    check_rope(rope_table, blocks.head_dim, start + tokens)
    q = np.empty((tokens, heads, width), np.float32)
    call = _AppendCall(
        KV.of(blocks, ids),
        Rope.of(rope_table),
        *map(address, (weight, source, q)),
        epsilon,
        layer,
        heads,
        tokens,
        start,
        threads,
    )
    library.edgellm_append_latents(ctypes.byref(call))
    return q
