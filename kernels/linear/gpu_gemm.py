"""Some rows times int4 or int8 panels on tensor cores, in Triton; `gpu.py` calls it.

Weights and activations become halves, each row of activations divided by its largest value, so that
no half overflows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    inputs: tl.tensor,
    epsilon: tl.tensor,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A row, normed or not, as halves between -1 and 1 and their scale; the grid counts rows."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, inputs, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * inputs + k, mask=k < inputs, other=0.0)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=k < inputs, other=0.0)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.max(largest, axis=0)
    divisor = tl.where(scale > 0, scale, 1.0)
    for first in range(0, inputs, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * inputs + k, mask=k < inputs, other=0.0)
        if NORM:
            x *= tl.load(norm_ptr + k, mask=k < inputs, other=0.0)
        tl.store(halves_ptr + row * inputs + k, (x / divisor).to(tl.float16), mask=k < inputs)
    if NORM:
        scale /= tl.sqrt(tl.sum(squares, axis=0) / inputs + epsilon)
    tl.store(scale_ptr + row, scale)


@triton.jit
def weight_tile(
    bytes_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    panel: tl.tensor,
    group: tl.tensor,
    panels: tl.tensor,
    groups: tl.tensor,
    BITS: tl.constexpr,
    AFFINE: tl.constexpr,
) -> tl.tensor:
    """The weights of panels `[P]` and groups `[G]` as halves `[32 G, 16 P]`."""
    P: tl.constexpr = panel.shape[0]
    G: tl.constexpr = group.shape[0]
    CODE_BYTES: tl.constexpr = 64 * BITS
    RECORD_BYTES: tl.constexpr = CODE_BYTES + (64 if AFFINE else 32)
    record = panel[:, None].to(tl.int64) * groups + group[None, :]
    there = ((panel < panels)[:, None] & (group < groups)[None, :])[:, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    half = record[:, :, None] * (RECORD_BYTES // 2) + CODE_BYTES // 2 + lane
    scale = tl.load(halves_ptr + half, mask=there, other=0.0).to(tl.float32)
    byte = record[:, :, None] * RECORD_BYTES + tl.arange(0, CODE_BYTES)[None, None, :]
    codes = tl.load(bytes_ptr + byte, mask=there, other=0)
    codes = tl.reshape(codes, [P, G, BITS, 16, 4])
    scale = tl.reshape(scale, [P, G, 1, 16, 1])
    if BITS == 8:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32) * scale
        tile = tl.permute(values.to(tl.float16), [1, 2, 4, 0, 3])
    else:
        if AFFINE:
            offset = tl.load(halves_ptr + half + 16, mask=there, other=0.0).to(tl.float32)
            offset = tl.reshape(offset, [P, G, 1, 16, 1])
        else:
            offset = -8.0 * scale
        low = ((codes & 15).to(tl.float32) * scale + offset).to(tl.float16)
        high = ((codes >> 4).to(tl.float32) * scale + offset).to(tl.float16)
        tile = tl.permute(tl.join(low, high), [1, 5, 2, 4, 0, 3])
    return tl.reshape(tile, [G * 32, P * 16])


@triton.jit
def gemm_kernel(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bytes_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    up_bytes_ptr: tl.tensor,
    up_halves_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BITS: tl.constexpr,
    AFFINE: tl.constexpr,
    UP_AFFINE: tl.constexpr,
    ROWS: tl.constexpr,
    PANELS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """ROWS rows of `rows_kernel` times 16 * PANELS outputs; the grid counts panels, then rows."""
    panel = tl.program_id(0) * PANELS + tl.arange(0, PANELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    panels = tl.cdiv(outputs, 16)
    groups = inputs // 32
    acc = tl.zeros([ROWS, PANELS * 16], tl.float32)
    up = tl.zeros([ROWS, PANELS * 16], tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        k = first * 32 + tl.arange(0, GROUPS * 32)
        x = tl.load(
            x_ptr + row[:, None].to(tl.int64) * inputs + k[None, :],
            mask=(row < rows)[:, None] & (k < inputs)[None, :],
            other=0.0,
        )
        w = weight_tile(bytes_ptr, halves_ptr, panel, group, panels, groups, BITS, AFFINE)
        acc = tl.dot(x, w, acc)
        if GATED:
            w = weight_tile(
                up_bytes_ptr, up_halves_ptr, panel, group, panels, groups, BITS, UP_AFFINE
            )
            up = tl.dot(x, w, up)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)[:, None]
    y = acc * scale
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * (up * scale)
    output = tl.program_id(0) * PANELS * 16 + tl.arange(0, PANELS * 16)
    there = (row < rows)[:, None] & (output < outputs)[None, :]
    place = row[:, None].to(tl.int64) * outputs + output[None, :]
    if ADD:
        y += tl.load(y_ptr + place, mask=there, other=0.0)
    tl.store(y_ptr + place, y, mask=there)
