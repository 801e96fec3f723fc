"""Sealing in Triton: the blocks that rows of a step are the first to read sealed.

A program has a row, a KV head and keys or values, and nothing to do unless its row is the first one
of a block with two others before it that can be sealed. So device memory says what is sealed, and a
captured CUDA graph serves every step. It is one launch a layer, 127 of 128 times for nothing.

Codes and scales are those of the reference, but for numbers so near the middle of two codes that
float32 cannot tell, and the last bit of a scale in halves. Values of 4 bits come of whole numbers
alone, and have the reference's codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import aligned
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, SealedPlace, key_places, value_places
from edgellm.kernels.hadamard.gpu import spread
from edgellm.kernels.kv_append.gpu import hadamard_size
from edgellm.kernels.kv_blocks import BLOCK, SEALED

ROWS = 16  # of a block that are in registers at once


@triton.jit
def packed(codes: tl.tensor, ROW: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Pack codes `[R, WIDTH]` to bytes `[R, WIDTH * BITS / 8]`, of which ROW are of a row."""
    R: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1] * BITS // 8
    i = tl.broadcast_to(tl.arange(0, BYTES)[None, :], [R, BYTES])
    both = tl.gather(codes, i, 1)
    for part in tl.static_range(1, 8 // BITS):
        both |= tl.gather(codes, i + part * ROW, 1) << (part * BITS)
    return both.to(tl.uint8)


@triton.jit
def plain_keys(
    k_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HADAMARD: tl.constexpr,
) -> tl.tensor:
    """Load keys of a head's block as they were before the transform, `[R, WIDTH]`."""
    R: tl.constexpr = rows.shape[0]
    d = tl.arange(0, WIDTH)
    at = key_places(rows[:, None], d[None, :], HEAD_DIM)
    codes = tl.load(k_ptr + at, mask=(d < HEAD_DIM)[None, :], other=0)
    x = codes.to(tl.float32) * tl.load(scale_ptr + rows)[:, None]
    return tl.reshape(spread(tl.reshape(x, [R * WIDTH]), HADAMARD), [R, WIDTH])


@triton.jit
def seal_channels(
    k_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    to_ptr: tl.tensor,
    line_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HADAMARD: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Seal the keys of a head's block, by channel: a line through the codes, by least squares."""
    TOP: tl.constexpr = (1 << BITS) - 1
    ROW: tl.constexpr = HEAD_DIM * BITS // 8
    least = tl.full([WIDTH], float("inf"), tl.float32)
    most = tl.full([WIDTH], float("-inf"), tl.float32)
    for first in range(0, BLOCK, ROWS):
        rows = first + tl.arange(0, ROWS)
        x = plain_keys(k_ptr, scale_ptr, rows, HEAD_DIM, WIDTH, HADAMARD)
        least = tl.minimum(least, tl.min(x, axis=0))
        most = tl.maximum(most, tl.max(x, axis=0))
    center, extent = 0.5 * (least + most), most - least
    step = tl.where(extent > 0, TOP / tl.where(extent > 0, extent, 1.0), 0.0)
    sums = tl.zeros([WIDTH], tl.float32)
    squares, total, product = sums, sums, sums
    for first in range(0, BLOCK, ROWS):
        rows = first + tl.arange(0, ROWS)
        rest = plain_keys(k_ptr, scale_ptr, rows, HEAD_DIM, WIDTH, HADAMARD) - center[None, :]
        code = tl.floor(rest * step[None, :] + (TOP + 1) // 2)
        code = tl.minimum(tl.maximum(code, 0.0), TOP)
        odd = 2 * code - TOP
        sums += tl.sum(odd, axis=0)
        squares += tl.sum(odd * odd, axis=0)
        total += tl.sum(rest, axis=0)
        product += tl.sum(odd * rest, axis=0)
        i = tl.arange(0, WIDTH * BITS // 8)
        at = key_places(rows[:, None], i[None, :], ROW)
        tl.store(to_ptr + at, packed(code.to(tl.int32), ROW, BITS), mask=(i < ROW)[None, :])
    apart = BLOCK * squares - sums * sums
    half = (BLOCK * product - sums * total) / tl.where(apart > 0, apart, 1.0)
    middle = center + (total - half * sums) / BLOCK
    d = tl.arange(0, WIDTH)
    tl.store(line_ptr + d, half.to(tl.float16), mask=d < HEAD_DIM)
    tl.store(line_ptr + HEAD_DIM + d, middle.to(tl.float16), mask=d < HEAD_DIM)


@triton.jit
def copy_keys(
    k_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    to_ptr: tl.tensor,
    to_scale_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy the keys of a head's block, with scales in halves."""
    row = tl.arange(0, BLOCK)
    tl.store(to_scale_ptr + row, tl.load(scale_ptr + row).to(tl.float16))
    for first in range(0, BLOCK * HEAD_DIM, 1024):
        e = first + tl.arange(0, 1024)
        tl.store(to_ptr + e, tl.load(k_ptr + e))


@triton.jit
def seal_values(
    v_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    to_ptr: tl.tensor,
    to_scale_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Seal the values of a head's block: codes, and scales of rows by least squares."""
    TOP: tl.constexpr = (1 << BITS) - 1
    ROW: tl.constexpr = HEAD_DIM * BITS // 8
    SCALES: tl.constexpr = 2 if BITS == 2 else 1
    PART: tl.constexpr = HEAD_DIM // SCALES
    d = tl.arange(0, WIDTH)
    for first in range(0, BLOCK, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = value_places(rows[:, None], d[None, :], HEAD_DIM)
        x = tl.load(v_ptr + at, mask=(d < HEAD_DIM)[None, :], other=0).to(tl.float32)
        scale = tl.load(scale_ptr + rows)
        codes = tl.zeros([ROWS, WIDTH], tl.int32)
        for part in tl.static_range(SCALES):
            own = (d // PART == part)[None, :]
            y = tl.where(own, x, 0.0)
            if BITS == 4:
                size = tl.max(tl.abs(y), axis=1) * (1.0 / 16)
            else:
                size = 0.498 * tl.sqrt(tl.sum(y * y, axis=1) / PART)
            step = tl.where(size > 0, 0.5 / tl.where(size > 0, size, 1.0), 0.0)
            code = tl.floor(y * step[:, None] + (TOP + 1) // 2)
            code = tl.minimum(tl.maximum(code, 0.0), TOP)
            odd = tl.where(own, 2 * code - TOP, 0.0)
            best = tl.sum(odd * y, axis=1) / tl.sum(odd * odd, axis=1)
            tl.store(to_scale_ptr + part * BLOCK + rows, (scale * best).to(tl.float16))
            codes += tl.where(own, code, 0.0).to(tl.int32)
        i = tl.arange(0, WIDTH * BITS // 8)
        at = value_places(rows[:, None], i[None, :], ROW)
        tl.store(to_ptr + at, packed(codes, ROW, BITS), mask=(i < ROW)[None, :])


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def seal_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    sealed_k_ptr: tl.tensor,
    sealed_v_ptr: tl.tensor,
    sealed_k_scale_ptr: tl.tensor,
    sealed_v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sealed_table_ptr: tl.tensor,
    row_ptr: tl.tensor,
    table_stride: tl.tensor,
    row_stride: tl.tensor,
    kv_heads: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HADAMARD: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Seal a block for a KV head; the grid counts rows, KV heads, and keys and values."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    row_ptr += tl.program_id(0) * row_stride
    kv_head = tl.program_id(1)
    position, table = tl.load(row_ptr), tl.load(row_ptr + 1)
    number = position // BLOCK - 2
    if (position % BLOCK != 0) | (number < 1):
        return
    at = table * table_stride + number
    block, to = tl.load(table_ptr + at), tl.load(sealed_table_ptr + at)
    place = (block * layers + layer) * kv_heads + kv_head
    to_place = (to * layers + layer) * kv_heads + kv_head
    KEY_ROW: tl.constexpr = HEAD_DIM * KEY_BITS // 8
    VALUE_ROW: tl.constexpr = HEAD_DIM * VALUE_BITS // 8
    SCALES: tl.constexpr = 2 if VALUE_BITS == 2 else 1
    if tl.program_id(2) == 1:
        seal_values(
            v_ptr + place * (BLOCK * HEAD_DIM),
            v_scale_ptr + place * BLOCK,
            sealed_v_ptr + to_place * (BLOCK * VALUE_ROW),
            sealed_v_scale_ptr + to_place * (SCALES * BLOCK),
            HEAD_DIM,
            WIDTH,
            VALUE_BITS,
            ROWS,
            BLOCK,
        )
    else:
        k_ptr += place * (BLOCK * HEAD_DIM)
        k_scale_ptr += place * BLOCK
        sealed_k_ptr += to_place * (BLOCK * KEY_ROW)
        if KEY_BITS == 8:
            sealed_k_scale_ptr += to_place * BLOCK
            copy_keys(k_ptr, k_scale_ptr, sealed_k_ptr, sealed_k_scale_ptr, HEAD_DIM, BLOCK)
        else:
            seal_channels(
                k_ptr,
                k_scale_ptr,
                sealed_k_ptr,
                sealed_k_scale_ptr + to_place * (2 * HEAD_DIM),
                HEAD_DIM,
                WIDTH,
                HADAMARD,
                KEY_BITS,
                ROWS,
                BLOCK,
            )


def seal(
    blocks: DeviceBlocks,
    tables: torch.Tensor,
    sealed: SealedPlace,
    layer: int,
    rows: torch.Tensor,
) -> None:
    """Seal the blocks of a layer that rows are the first to read so, once all rows are written.

    Args:
        tables: block ids of each sequence `[S, blocks]` int64, with the strides of the tables of
            sealed blocks, read on the device like `rows`.
        rows: `[C, 2 or more]` int32: position of each token, and index of its block table.
    """
    host, bits = blocks.host, sealed.sealing
    width = max(16, aligned(host.head_dim))
    seal_kernel[(len(rows), host.kv_heads, 2)](
        blocks.k,
        blocks.v,
        blocks.k_scale,
        blocks.v_scale,
        *sealed.arrays,
        tables,
        sealed.tables,
        rows,
        tables.stride(0),
        rows.stride(0),
        host.kv_heads,
        layer,
        host.layers,
        HEAD_DIM=host.head_dim,
        WIDTH=width,
        HADAMARD=hadamard_size(blocks, SEALED, host.head_dim),
        KEY_BITS=bits.key_bits,
        VALUE_BITS=bits.value_bits,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=8 if width <= 64 else 4,  # else 8 bytes spill on sm_80, of heads of 64 or 128
        **early(),
    )
