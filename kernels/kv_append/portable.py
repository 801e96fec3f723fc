"""KV append in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels import rope
from edgellm.kernels.kv_blocks import BlockTable, KVBlocks, slots

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
    ids, rows = slots(table, start, k.shape[0])
    _write(blocks.k, blocks.k_scale, ids, layer, rows, k)
    _write(blocks.v, blocks.v_scale, ids, layer, rows, v)


def append_rotated(
    blocks: KVBlocks,
    table: BlockTable,
    layer: int,
    start: int,
    qkv: NDArray[np.float32],
    rope_table: rope.RopeTable,
) -> NDArray[np.float32]:
    """See `append_rotated` in `__init__.py`."""
    kv_heads = blocks.k.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    rotated = rope.apply(qkv[:, : heads + kv_heads], rope_table, start)
    append(blocks, table, layer, start, rotated[:, heads:], qkv[:, heads + kv_heads :])
    return rotated[:, :heads]


def _write(
    target: NDArray[Any],
    scales: NDArray[np.float32] | None,
    ids: NDArray[np.intp],
    layer: int,
    rows: NDArray[np.intp],
    values: NDArray[np.float32],
) -> None:
    if scales is None:
        target[ids, layer, :, rows] = values
        return
    scale = np.abs(values).max(axis=-1) * np.float32(1 / 127)  # [C, Hkv]
    target[ids, layer, :, rows] = np.rint(values / np.maximum(scale, _TINY)[..., None])
    scales[ids, layer, :, rows] = scale
