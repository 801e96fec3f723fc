"""KV append in Triton: RoPE, rounding and the block table for one token and head a program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import aligned
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.hadamard import power_of_two_factor
from edgellm.kernels.hadamard.gpu import hadamard_matrix
from edgellm.kernels.kv_blocks import BLOCK, SCALED


@triton.jit
def round_half_even(x: tl.tensor) -> tl.tensor:
    """For |x| < 2^22: adding 1.5 * 2^23 leaves a float no bits behind the point."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rotated(
    row_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    half: tl.tensor,
    BIAS: tl.constexpr,
) -> tl.tensor:
    """Elements `d` of a head's row after RoPE; `cos` and `sin` are those of its position."""
    x = tl.load(row_ptr + d, mask=inside, other=0.0)
    if BIAS:
        x += tl.load(bias_ptr + d, mask=inside, other=0.0)
    turns = inside & (d < 2 * half)
    second = d >= half
    other = tl.where(second, d - half, d + half)
    partner = tl.load(row_ptr + other, mask=turns, other=0.0)
    if BIAS:
        partner += tl.load(bias_ptr + other, mask=turns, other=0.0)
    angle = tl.where(second, d - half, d)
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    return x * cos + tl.where(second, partner, -partner) * sin


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def append_kernel(
    qkv_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start_ptr: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    half: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    HADAMARD: tl.constexpr,
    BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The grid counts tokens, then heads: those of Q, of K, of V. WIDTH is a power of two."""
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(start_ptr) + token
    row_ptr = qkv_ptr + (token.to(tl.int64) * (heads + 2 * kv_heads) + head) * HEAD_DIM
    d = tl.arange(0, WIDTH)
    inside = d < HEAD_DIM
    cos_ptr += position.to(tl.int64) * half
    sin_ptr += position.to(tl.int64) * half
    is_value = head >= heads + kv_heads
    turning = tl.where(is_value, 0, half)
    x = rotated(row_ptr, bias_ptr + head * HEAD_DIM, cos_ptr, sin_ptr, d, inside, turning, BIAS)
    if OFFSET:
        shifted = tl.where(is_value | (head < heads), 0, HEAD_DIM)
        offset_ptr += (layer * kv_heads + head - heads) * HEAD_DIM
        x -= tl.load(offset_ptr + d, mask=d < shifted, other=0.0)
    if HADAMARD > 0:
        spread = tl.sum(hadamard_matrix(d[:, None], d[None, :], HADAMARD) * x[None, :], axis=1)
        x = tl.where(is_value, x, spread) if FORMAT == "int8" else spread
    if head < heads:
        out = (token.to(tl.int64) * heads + head) * HEAD_DIM + d
        tl.store(q_ptr + out, x, mask=inside)
    else:
        kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
        block = tl.load(table_ptr + position // BLOCK)
        place = (block * layers + layer) * kv_heads + kv_head
        at = position % BLOCK
        largest = tl.max(tl.abs(tl.where(inside, x, 0.0)), axis=0)
        ROW: tl.constexpr = HEAD_DIM // 2 if FORMAT == "int4" else HEAD_DIM
        e = tl.arange(0, WIDTH // 2 if FORMAT == "int4" else WIDTH)
        scale = largest
        if FORMAT == "int8":
            scale = largest * (1.0 / 127)
            stored = round_half_even(x / tl.maximum(scale, 1.1754944e-38)).to(tl.int8)
        elif FORMAT == "int4":
            scale = largest * (1.0 / 16)
            step = 2.0 * tl.maximum(scale, 1.1754944e-38)
            code = tl.minimum(tl.maximum(tl.floor(x / step) + 8.0, 0.0), 15.0)
            # element e of the first half beside element e of the second one
            first = d[None, :] == e[:, None]
            second = d[None, :] == (e + ROW)[:, None]
            both = tl.where(first, 1.0, tl.where(second, 16.0, 0.0)) * code[None, :]
            stored = tl.sum(both, axis=1).to(tl.uint8)
        elif FORMAT == "f16":
            stored = x.to(tl.float16)
        else:
            stored = x
        if is_value:
            offset = at // 4 * (ROW * 4) + e * 4 + at % 4
            tl.store(v_ptr + place * (BLOCK * ROW) + offset, stored, mask=e < ROW)
            if FORMAT == "int8" or FORMAT == "int4":
                tl.store(v_scale_ptr + place * BLOCK + at, scale)
        else:
            offset = at // 16 * (ROW * 16) + e // 4 * 64 + at % 16 * 4 + e % 4
            tl.store(k_ptr + place * (BLOCK * ROW) + offset, stored, mask=e < ROW)
            if FORMAT == "int8" or FORMAT == "int4":
                tl.store(k_scale_ptr + place * BLOCK + at, scale)


def append_rotated(
    blocks: DeviceBlocks,
    table: torch.Tensor,
    layer: int,
    start: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """Apply RoPE to Q and K, write K and V at positions `start ..`, and Q to `q`.

    Args:
        table: block ids, int64; `start`: one int32. Both are read on the device.
        qkv: `[C, H + 2 Hkv, D]` float32.
        cos, sin: `[positions, half]` float32.
        q: `[C, H, D]` float32; for int8 and int4 blocks after the Hadamard transform.
        bias: added to `qkv` before that, `[H + 2 Hkv, D]` float32, if anything.
    """
    host, head_dim = blocks.host, blocks.host.head_dim
    tokens, heads = qkv.shape[0], qkv.shape[1] - 2 * host.kv_heads
    append_kernel[(tokens, qkv.shape[1])](
        qkv,
        qkv if bias is None else bias,
        cos,
        sin,
        q,
        blocks.k,
        blocks.v,
        blocks.k_scale,
        blocks.v_scale,
        blocks.k if blocks.key_offset is None else blocks.key_offset,
        table,
        start,
        heads,
        host.kv_heads,
        cos.shape[1],
        layer,
        host.layers,
        HEAD_DIM=head_dim,
        WIDTH=aligned(head_dim),
        FORMAT=blocks.format,
        HADAMARD=hadamard_size(blocks, SCALED),
        BIAS=bias is not None,
        OFFSET=blocks.key_offset is not None,
        BLOCK=BLOCK,
        num_warps=4 if blocks.format in SCALED else 1,
    )


def hadamard_size(blocks: DeviceBlocks, formats: Sequence[str]) -> int:
    """Of the transform before rounding; 0 for blocks of none of `formats`."""
    head_dim = blocks.host.head_dim
    return power_of_two_factor(head_dim, limit=head_dim) if blocks.format in formats else 0
