"""Head norms, RoPE, quantization and KV append in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels import hadamard, rope
from edgellm.kernels.kv_append.norms import HeadNorms
from edgellm.kernels.kv_blocks import SEALED, BlockTable, KVBlocks, slots

_TINY = np.float32(np.finfo(np.float32).tiny)


def append(
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    start: int,
    k: NDArray[np.float32],
    v: NDArray[np.float32],
) -> None:
    """Write K and V rows `[C, Hkv, D]` (K after RoPE) at positions `start .. start + C`."""
    if blocks.key_offset is not None:
        k = k - blocks.key_offset[layer]
    k_codes, k_scale = stored(blocks, k, key=True)
    v_codes, v_scale = stored(blocks, v, key=False)
    blocks.write(table, layer, start, k_codes, v_codes)
    ids, rows = slots(table, start, k.shape[0])
    for target, scale in ((blocks.k_scale, k_scale), (blocks.v_scale, v_scale)):
        if target is not None:
            target[ids, layer, :, rows] = scale


def append_rotated(
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    start: int,
    qkv: NDArray[np.float32],
    rope_table: rope.RopeTable,
    *,
    norms: HeadNorms | None = None,
    queries_alone: bool = False,
) -> NDArray[np.float32]:
    """Append a chunk's K and V to the KV cache; see `append_rotated` in `__init__.py`."""
    kv_heads = blocks.kv_heads
    heads = qkv.shape[1] - (0 if queries_alone else 2 * kv_heads)
    q, k, v = np.split(qkv, (heads, heads + kv_heads), axis=1)
    if norms is not None:
        norms.check(heads, kv_heads, qkv.shape[2])

    def turned(x: NDArray[np.float32], weight: NDArray[np.float32] | None) -> NDArray[np.float32]:
        if norms is None or weight is None:
            return rope.apply(x, rope_table, start)
        if norms.after_rope:
            return normalized(rope.apply(x, rope_table, start), weight, norms.epsilon)
        return rope.apply(normalized(x, weight, norms.epsilon), rope_table, start)

    q = turned(q, None if norms is None else norms.q)
    if queries_alone:
        return q
    k = turned(k, None if norms is None else norms.k)
    if norms is not None and norms.values:
        v = normalized(v, np.ones(v.shape[2], np.float32), norms.epsilon)
    append(blocks, table, layer, start, k, v)
    return q


def normalized(
    x: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float
) -> NDArray[np.float32]:
    """Apply an RMS norm to heads `[C, H, D]`: to each by a weight `[D]`, or to all by `[H*D]`."""
    tokens, heads, head_dim = x.shape
    rows = x if len(weight) == head_dim else x.reshape(tokens, 1, heads * head_dim)
    squares = np.square(rows).mean(axis=-1, keepdims=True)
    scaled: NDArray[np.float32] = rows / np.sqrt(squares + np.float32(epsilon)) * weight
    return scaled.reshape(x.shape)


def stored(
    blocks: KVBlocks, values: NDArray[np.float32], *, key: bool
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Return rows `[C, Hkv, D]` as stored codes or floats, and their scales `[C, Hkv]`, if any.

    Args:
        key: whether the rows are keys, not values.
    """
    if blocks.k_scale is None:
        return values.astype(blocks.k.dtype), None
    if key or blocks.format in SEALED:
        values = hadamard.transform(values)
    scale = np.abs(values).max(axis=-1) * np.float32(1 / 127)
    codes = np.rint(values / np.maximum(scale, _TINY)[..., None])
    return codes.astype(np.int8), scale
