"""KV append in Triton: head norms, RoPE, rounding and the block table.

A program has one token and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import aligned, on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, key_places, value_places
from edgellm.kernels.hadamard import power_of_two_factor
from edgellm.kernels.hadamard.gpu import spread
from edgellm.kernels.kv_append.norms import HeadNorms
from edgellm.kernels.kv_blocks import BLOCK, SCALED, SEALED


@dataclass(frozen=True)
class DeviceNorms:
    """`HeadNorms` in device memory.

    Attributes:
        weights: weights for Q, then for K: `[2 D]` for each head, `[(H + Hkv) D]` for all together.
        order: "each": every head by itself before RoPE; "whole": all heads together before RoPE;
            "after_rope": every head by itself after RoPE.
        values: whether each head of V is normalized as well, without a weight.
    """

    weights: torch.Tensor
    epsilon: float
    order: Literal["each", "whole", "after_rope"]
    values: bool

    @classmethod
    def of(cls, norms: HeadNorms, head_dim: int, device: str) -> DeviceNorms:
        weights = on_device(np.concatenate([norms.q, norms.k]), device)
        if norms.after_rope:
            return cls(weights, norms.epsilon, "after_rope", norms.values)
        order: Literal["each", "whole"] = "whole" if norms.whole(head_dim) else "each"
        return cls(weights, norms.epsilon, order, norms.values)


@triton.jit
def round_half_even(x: tl.tensor) -> tl.tensor:
    """Round |x| < 2^22 to the nearest integer, halves to even.

    Adding 1.5 * 2^23 leaves a float no bits behind the point.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def biased(
    row_ptr: tl.tensor, bias_ptr: tl.tensor, at: tl.tensor, there: tl.tensor, BIAS: tl.constexpr
) -> tl.tensor:
    """Load elements `at` of a row, plus its bias if any; 0 where the mask `there` is false."""
    x = tl.load(row_ptr + at, mask=there, other=0.0)
    if BIAS:
        x += tl.load(bias_ptr + at, mask=there, other=0.0)
    return x


@triton.jit
def inverse_rms(
    row_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    size: tl.tensor,
    epsilon: tl.tensor,
    BIAS: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """Return the factor of an RMS norm for `size` numbers, which are read SPAN at a time."""
    squares = tl.zeros([SPAN], tl.float32)
    for first in range(0, size, SPAN):
        k = first + tl.arange(0, SPAN)
        x = biased(row_ptr, bias_ptr, k, k < size, BIAS)
        squares += x * x
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / size + epsilon)


@triton.jit
def rotated(
    row_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    half: tl.tensor,
    factor: tl.tensor,
    normed: tl.tensor,
    BIAS: tl.constexpr,
    NORMED: tl.constexpr,
) -> tl.tensor:
    """Return elements `d` of a head's row after RoPE; `cos` and `sin` belong to its position.

    Args:
        half: number of pairs that RoPE turns; 0 for values.
        factor: factor of the norm before RoPE, besides its weights.
        normed: number of elements with norm weights, from the first on; only where NORMED.
    """
    x = biased(row_ptr, bias_ptr, d, inside, BIAS)
    turns = inside & (d < 2 * half)
    second = d >= half
    other = tl.where(second, d - half, d + half)
    partner = biased(row_ptr, bias_ptr, other, turns, BIAS)
    if NORMED:
        x *= factor * tl.load(norm_ptr + d, mask=d < normed, other=1.0)
        partner *= factor * tl.load(norm_ptr + other, mask=turns & (other < normed), other=1.0)
    angle = tl.where(second, d - half, d)
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    return x * cos + tl.where(second, partner, -partner) * sin


@triton.jit
def store_row(
    x: tl.tensor,
    row_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    place: tl.tensor,
    at: tl.tensor,
    KEY: tl.constexpr,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Round the first SIZE numbers, and write them to row `at` of a head's block.

    Args:
        place: number of the block and head.
        KEY: whether they are a key, not a value.
    """
    e = tl.arange(0, x.numel)
    if FORMAT == "int8":
        scale = tl.max(tl.abs(tl.where(e < SIZE, x, 0.0)), axis=0) * (1.0 / 127)
        x = round_half_even(x / tl.maximum(scale, 1.1754944e-38)).to(tl.int8)
        tl.store(scale_ptr + place * BLOCK + at, scale)
    elif FORMAT == "f16":
        x = x.to(tl.float16)
    offset = key_places(at, e, SIZE) if KEY else value_places(at, e, SIZE)
    tl.store(row_ptr + place * (BLOCK * SIZE) + offset, x, mask=e < SIZE)


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def append_kernel(
    qkv_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_ptr: tl.tensor,
    plain_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    table_ptr: tl.tensor,
    place_ptr: tl.tensor,
    table_stride: tl.tensor,
    place_stride: tl.tensor,
    row_heads: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    half: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    epsilon: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    HADAMARD: tl.constexpr,
    SPREAD_VALUES: tl.constexpr,
    PLAIN: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    VALUES: tl.constexpr,
    SHARED: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalize and rotate one head of a token; store queries, or write K or V to its block.

    The grid counts tokens, then heads of Q, K and V, or of Q alone. WIDTH is HEAD_DIM rounded up to
    a power of two.

    Args:
        row_heads: number of heads in a row of `qkv`.
        NORM, VALUES: order and values of `DeviceNorms`, or None and False.
        SPREAD_VALUES: whether values go through the Hadamard transform as well.
        PLAIN: whether queries are stored as they are before it, too.
        SHARED: whether V is K, which a row has once.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    token, head = tl.program_id(0), tl.program_id(1)
    place_ptr += token * place_stride
    position = tl.load(place_ptr)
    table_ptr += tl.load(place_ptr + 1) * table_stride
    d = tl.arange(0, WIDTH)
    inside = d < HEAD_DIM
    cos_ptr += position.to(tl.int64) * half
    sin_ptr += position.to(tl.int64) * half
    is_value = head >= heads + kv_heads
    is_query = head < heads
    source = head
    if SHARED:
        source = tl.where(is_value, head - kv_heads, head)
    row_ptr = qkv_ptr + (token.to(tl.int64) * row_heads + source) * HEAD_DIM
    turning = tl.where(is_value, 0, half)
    normed = tl.where(is_value, 0, HEAD_DIM)
    factor = 1.0
    if NORM == "whole":
        norm_ptr += head * HEAD_DIM
        # the program of each head reads all heads, which lie in the processor's cache
        first_head = tl.where(is_query, 0, heads)
        size = tl.where(is_query, heads, kv_heads) * HEAD_DIM
        if VALUES:
            first_head = tl.where(is_value, source, first_head)
            size = tl.where(is_value, HEAD_DIM, size)
        all_ptr = row_ptr + (first_head - source) * HEAD_DIM
        factor = inverse_rms(all_ptr, bias_ptr + first_head * HEAD_DIM, size, epsilon, BIAS, 1024)
    elif NORM is not None:
        norm_ptr += tl.where(is_query, 0, HEAD_DIM)
    bias_ptr += source * HEAD_DIM
    if NORM == "each":
        factor = inverse_rms(row_ptr, bias_ptr, HEAD_DIM, epsilon, BIAS, WIDTH)
    if NORM is not None and not VALUES:
        factor = tl.where(is_value, 1.0, factor)
    x = rotated(
        row_ptr,
        bias_ptr,
        norm_ptr,
        cos_ptr,
        sin_ptr,
        d,
        inside,
        turning,
        factor,
        normed,
        BIAS,
        NORM == "each" or NORM == "whole",
    )
    if NORM == "after_rope":
        factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / HEAD_DIM + epsilon)
        factor *= tl.load(norm_ptr + d, mask=d < normed, other=1.0)
        x *= factor if VALUES else tl.where(is_value, 1.0, factor)
    if OFFSET:
        shifted = tl.where(is_value | (head < heads), 0, HEAD_DIM)
        offset_ptr += (layer * kv_heads + head - heads) * HEAD_DIM
        x -= tl.load(offset_ptr + d, mask=d < shifted, other=0.0)
    if PLAIN:
        plain_ptr += (token.to(tl.int64) * heads + head) * HEAD_DIM
        tl.store(plain_ptr + d, x, mask=d < tl.where(is_query, HEAD_DIM, 0))
    if HADAMARD > 0:
        after = spread(x, HADAMARD)
        x = after if SPREAD_VALUES else tl.where(is_value, x, after)
    if head < heads:
        out = (token.to(tl.int64) * heads + head) * HEAD_DIM + d
        tl.store(q_ptr + out, x, mask=inside)
    else:
        kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
        block = tl.load(table_ptr + position // BLOCK)
        place = (block * layers + layer) * kv_heads + kv_head
        at = position % BLOCK
        if is_value:
            store_row(x, v_ptr, v_scale_ptr, place, at, False, HEAD_DIM, FORMAT, BLOCK)
        else:
            store_row(x, k_ptr, k_scale_ptr, place, at, True, HEAD_DIM, FORMAT, BLOCK)


def append_rotated(
    blocks: DeviceBlocks,
    tables: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norms: DeviceNorms | None = None,
    plain: torch.Tensor | None = None,
) -> None:
    """Normalize Q and K, apply RoPE to them, write K and V at their positions, and Q to `q`.

    Args:
        tables: block ids of each sequence `[S, blocks]` int64, read on the device like `rows`.
        rows: `[C, 2 or more]` int32: position of each token, and index of its block table.
        qkv: `[C, H + 2 Hkv, D]` float32; `[C, H + Hkv, D]` where V is K before its norm, and
            `[C, H, D]` in a layer that reads K and V of another, which writes none.
        cos, sin: RoPE table, `[positions, half]` float32.
        q: output `[C, H, D]` float32; for blocks with scales after the Hadamard transform.
        bias: biases of a row of `qkv`, added before norms, float32, or None.
        norms: norms of Q, K and V, if any.
        plain: output like `q` before the Hadamard transform, or None.
    """
    host, head_dim = blocks.host, blocks.host.head_dim
    (tokens, row_heads), heads = qkv.shape[:2], q.shape[1]
    kv_heads = host.kv_heads if row_heads > heads else 0
    append_kernel[(tokens, heads + 2 * kv_heads)](
        qkv,
        qkv if bias is None else bias,
        qkv if norms is None else norms.weights,
        cos,
        sin,
        q,
        q if plain is None else plain,
        blocks.k,
        blocks.v,
        blocks.k_scale,
        blocks.v_scale,
        blocks.k if blocks.key_offset is None else blocks.key_offset,
        tables,
        rows,
        tables.stride(0),
        rows.stride(0),
        row_heads,
        heads,
        kv_heads,
        cos.shape[1],
        layer,
        host.layers,
        0.0 if norms is None else norms.epsilon,
        HEAD_DIM=head_dim,
        WIDTH=aligned(head_dim),
        FORMAT=blocks.row_format,
        HADAMARD=hadamard_size(blocks, SCALED, head_dim),
        SPREAD_VALUES=blocks.format in SEALED,
        PLAIN=plain is not None,
        BIAS=bias is not None,
        NORM=None if norms is None else norms.order,
        VALUES=norms is not None and norms.values,
        SHARED=0 < kv_heads == row_heads - heads,
        OFFSET=blocks.key_offset is not None,
        BLOCK=BLOCK,
        num_warps=4 if blocks.format in SCALED else 1,
        **early(),
    )


def hadamard_size(blocks: DeviceBlocks, formats: Sequence[str], width: int) -> int:
    """Return the size of the Hadamard transform before rows of some width are rounded.

    0: no format is that of the blocks.
    """
    return power_of_two_factor(width, limit=width) if blocks.format in formats else 0
