"""KV shift: moving K and V rows to other positions, as if computed there.

A key at position `p` is `R(p) x`, so `R(-distance)` turns it to the key at `p - distance` (RoPE, Su
et al., arXiv:2104.09864). So tokens behind a gap can close it without being computed again, and a
sequence goes on with its first tokens and a recent window (StreamingLLM, Xiao et al.,
arXiv:2309.17453); or those of a text can stand behind another one. Values do not depend on the
position. A quantized key is rounded once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.kernels import hadamard, rope
from edgellm.kernels.kv_append.portable import stored
from edgellm.kernels.kv_blocks import BLOCK, SCALED, BlockTable, KVBlocks, slots

__all__ = ["move"]


def move(
    blocks: KVBlocks,
    table: BlockTable,
    start: int,
    count: int,
    *,
    targets: BlockTable,
    row: int,
    distance: int,
    inv_freq: Sequence[Sequence[float]],
) -> None:
    """Write `count` tokens from position `start` of a sequence into rows `row ..` of other blocks.

    Args:
        blocks, table: pool, and block ids of the sequence.
        targets: ids of the blocks to write, none of which is read.
        row: first row to write in the first of them.
        distance: number of positions that the tokens move towards the start; negative: away.
        inv_freq: RoPE's frequencies in each layer, in radians per position.
    """
    ids = table[start // BLOCK : -(-(start + count) // BLOCK)]
    rows = slice(start % BLOCK, start % BLOCK + count)
    written = slots(targets, row, count)
    turns = {tuple(layer): _turn(layer, distance, count) for layer in inv_freq}
    for layer in range(blocks.layers):
        turn = turns[tuple(inv_freq[layer])]
        codes, values = blocks.read(ids, layer, slice(None), rows.stop)
        keys = codes[:, rows].astype(np.float32)  # [h, count, D]
        if blocks.k_scale is not None and blocks.v_scale is not None:
            scales = np.stack((blocks.k_scale[ids, layer], blocks.v_scale[ids, layer]))
            k_scale, v_scale = scales.swapaxes(1, 2).reshape(2, blocks.kv_heads, -1)[:, :, rows]
            keys *= k_scale[..., None]
            blocks.v_scale[written[0], layer, :, written[1]] = v_scale.T
        if blocks.format in SCALED:
            keys = hadamard.transform(keys)
        keys = keys.transpose(1, 0, 2)
        offset = np.float32(0) if blocks.key_offset is None else blocks.key_offset[layer]
        k, scale = stored(blocks, rope.apply(keys + offset, turn, 0) - offset, key=True)
        blocks.write(targets, layer, row, k, values[:, rows].transpose(1, 0, 2))
        if blocks.k_scale is not None and scale is not None:
            blocks.k_scale[written[0], layer, :, written[1]] = scale


def _turn(inv_freq: Sequence[float], distance: int, count: int) -> rope.RopeTable:
    """Return a RoPE table that turns each of `count` tokens back by `distance` positions.

    The table has no magnitude, because keys already contain RoPE's.
    """
    angle = -distance * np.asarray(inv_freq, np.float64)
    return rope.RopeTable(
        np.tile(np.cos(angle).astype(np.float32), (count, 1)),
        np.tile(np.sin(angle).astype(np.float32), (count, 1)),
    )
