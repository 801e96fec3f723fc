"""Attention over sealed blocks in Triton (`sealed_blocks.py`), for `gpu.py`.

A tile's rows see the sealed blocks first, and then the rows of the first block and the last ones.
Where a tile lies across the end of a block, its first rows read the block before the last as rows,
and the others as sealed; both loops have it then, each for its rows. Codes are exact in halves.
Keys by channel are codes times `half` in halves. The middles, which may be far larger and are
exact, are a product of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgellm.kernels.attention.gpu_rows import (
    in_parts,
    key_tile,
    query_tile,
    value_tile,
    with_values,
)
from edgellm.kernels.gpu.elementwise import soft_capped, softened


@triton.jit
def odd(codes: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the odd numbers that codes stand for."""
    return (codes.to(tl.int32) * 2 - ((1 << BITS) - 1)).to(tl.float16)


@triton.jit
def over_sealed(
    q_ptr: tl.tensor,
    ptrs: tl.tensor,
    table_ptr: tl.tensor,
    query: tl.tensor,
    there: tl.tensor,
    keys: tl.tensor,
    sealed: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    so_far: tl.tensor,
    HEAD_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CAP: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Take sealed blocks into the largest scores, weights and sums `so_far` of a tile of queries.

    WIDTH is HEAD_DIM, padded; numbers of a value stand in parts, see `value_tile`.

    Args:
        ptrs: K, V and their scales.
        keys: the first key of the split in a sealed block, and the one behind the last.
        sealed: number behind the last sealed block, of each row.
        head: KV head, their number, layer and their number.
    """
    BY_CHANNEL: tl.constexpr = KEY_BITS < 8
    KEY_PARTS: tl.constexpr = 8 // KEY_BITS
    KEY_ROW: tl.constexpr = HEAD_DIM // KEY_PARTS
    PARTS: tl.constexpr = 8 // VALUE_BITS
    SCALES: tl.constexpr = 2 if VALUE_BITS == 2 else 1
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = ptrs
    kv_head, kv_heads, layer, layers = head
    largest, weight, sums = so_far
    key_at, key_inside = in_parts(WIDTH, HEAD_DIM, KEY_PARTS)
    at = query[:, None] * HEAD_DIM + key_at[None, :]
    q, size = query_tile(q_ptr, at, there[:, None] & key_inside[None, :], "int8")
    size *= scale
    one = (tl.arange(0, 16) == 0)[None, :]
    begin, end = keys
    for first in range(begin, end, KEYS):
        block = tl.load(table_ptr + first // BLOCK)
        place = (block * layers + layer) * kv_heads + kv_head
        row = first % BLOCK
        j = row + tl.arange(0, KEYS)
        codes = key_tile(k_ptr + place * (BLOCK * KEY_ROW), row, KEY_ROW, WIDTH, KEYS, KEY_PARTS)
        if BY_CHANNEL:
            line_ptr = k_scale_ptr + place * (2 * HEAD_DIM) + key_at
            half = tl.load(line_ptr, mask=key_inside, other=0.0)
            middle = tl.load(line_ptr + HEAD_DIM, mask=key_inside, other=0.0)[:, None]
            middle = tl.where(one, middle, tl.zeros([WIDTH, 16], tl.float16))
            score = tl.dot(q, odd(codes, KEY_BITS) * half[:, None])
            score = (score + tl.sum(tl.dot(q, middle), axis=1)[:, None]) * size[:, None]
        else:
            k_scale = tl.load(k_scale_ptr + place * BLOCK + j).to(tl.float32)
            score = tl.dot(q, codes.to(tl.float16)) * size[:, None] * k_scale[None, :]
        if CAP:
            score = soft_capped(score, cap) * 1.4426950408889634
        score = tl.where((first // BLOCK < sealed)[:, None], score, float("-inf"))
        p, keep, largest, weight = softened(score, largest, weight)
        codes_ptr = v_ptr + place * (BLOCK * HEAD_DIM // PARTS)
        values = odd(
            value_tile(codes_ptr, row, HEAD_DIM, WIDTH, KEYS, PARTS, VALUE_BITS), VALUE_BITS
        )
        scale_ptr = v_scale_ptr + place * (SCALES * BLOCK) + j
        v_scale = tl.load(scale_ptr).to(tl.float32)
        if SCALES == 2:
            other = tl.load(scale_ptr + BLOCK).to(tl.float32)
            v_size = tl.max(tl.maximum(v_scale, other), axis=0)
            c = tl.arange(0, WIDTH)
            v_scale = tl.where((c < WIDTH // 2)[None, :], v_scale[:, None], other[:, None])
            values *= (v_scale / tl.where(v_size > 0, v_size, 1.0)).to(tl.float16)
            sums = sums * keep[:, None] + tl.dot(p.to(tl.float16), values) * v_size
        else:
            sums = with_values(sums, keep, p, values, v_scale)
    return largest, weight, sums
