"""Product of several rows and packed weights on tensor cores, in Triton; `gpu.py` calls it.

Weights and activations become halves, each row of activations divided by its largest value, so that
no half overflows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgellm.kernels.gpu.elementwise import activated, gate_factor, soft_capped
from edgellm.kernels.linear.gpu_packed import (
    group_start,
    looked_up,
    offsets,
    panel_start,
    scales,
)


@triton.jit
def epilogue(
    y: tl.tensor,
    up: tl.tensor,
    bias_ptr: tl.tensor,
    up_bias_ptr: tl.tensor,
    at: tl.tensor,
    known: tl.tensor,
    cap: tl.tensor,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    UP_BIAS: tl.constexpr,
    CAP: tl.constexpr,
) -> tl.tensor:
    """Compute cap(activation(y + bias) * factor(up + up_bias)), as far as the constants name it.

    Args:
        at, known: indices of the biases of outputs y, and which of these there are, of shapes that
            broadcast to that of y.
    """
    if BIAS:
        y += tl.load(bias_ptr + at, mask=known, other=0.0)
    y = activated(y, ACTIVATION)
    if GATED:
        if UP_BIAS:
            up += tl.load(up_bias_ptr + at, mask=known, other=0.0)
        y *= gate_factor(up, ACTIVATION)
    if CAP:
        y = soft_capped(y, cap)
    return y


@triton.jit
def rows_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    stride: tl.tensor,
    inputs: tl.tensor,
    epsilon: tl.tensor,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a row, normed or not, as halves from -1 to 1 and their scale; the grid counts rows."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, inputs, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + k, mask=k < inputs, other=0.0)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=k < inputs, other=0.0)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.max(largest, axis=0)
    divisor = tl.where(scale > 0, scale, 1.0)
    for first in range(0, inputs, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + k, mask=k < inputs, other=0.0)
        if NORM:
            x *= tl.load(norm_ptr + k, mask=k < inputs, other=0.0)
        tl.store(halves_ptr + row * inputs + k, (x / divisor).to(tl.float16), mask=k < inputs)
    if NORM:
        scale /= tl.sqrt(tl.sum(squares, axis=0) / inputs + epsilon)
    tl.store(scale_ptr + row, scale)


@triton.jit
def high_bits(
    data_ptr: tl.tensor,
    start: tl.tensor,
    there: tl.tensor,
    QUADS: tl.constexpr,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Load bits 4 and 5 of the codes of quads QUADS to QUADS + 3: `[P, G, 4, 16, 4]`.

    Args:
        start: first byte of the groups, `[P, G, 1]`.
        there: mask of the groups to load.
        QUADS: 0 or 4.
    """
    P: tl.constexpr = start.shape[0]
    G: tl.constexpr = start.shape[1]
    LINE: tl.constexpr = 256 if KIND.bits == 5 else 256 + 16 * QUADS
    byte = start + LINE + tl.arange(0, 256)[None, None, :] % 64
    high = tl.reshape(tl.load(data_ptr + byte, mask=there, other=0), [P, G, 4, 16, 4])
    quad = tl.arange(0, 4).to(tl.uint8)[None, None, :, None, None]
    high = high >> quad + QUADS & 1 if KIND.bits == 5 else high >> 2 * quad & 3
    return high << 4


@triton.jit
def code_values(code: tl.tensor, table_ptr: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return the values of codes of less than 8 bits, before `zero` is subtracted."""
    if KIND.table is None:
        values = code.to(tl.float32)
    else:
        values = looked_up(tl.load(table_ptr + tl.arange(0, 16)).to(tl.float32), code.to(tl.int32))
    return values


@triton.jit
def weight_tile(
    data_ptr: tl.tensor,
    table_ptr: tl.tensor,
    panel: tl.tensor,
    group: tl.tensor,
    panels: tl.tensor,
    groups: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Load the weights of panels `[P]` and groups `[G]` as halves `[32 G, 16 P]`."""
    P: tl.constexpr = panel.shape[0]
    G: tl.constexpr = group.shape[0]
    LINES: tl.constexpr = 8 if KIND.bits == 8 else 4
    panel, group = panel[:, None, None], group[None, :, None]
    there = (panel < panels) & (group < groups)
    lane = tl.arange(0, 16)[None, None, :]
    scale = scales(data_ptr, panel, group, groups, lane, 0, there, KIND)
    scale = tl.reshape(scale, [P, G, 1, 16, 1])
    start = group_start(panel, group, groups, KIND, 1)
    codes = tl.load(data_ptr + start + tl.arange(0, 64 * LINES)[None, None, :], mask=there, other=0)
    codes = tl.reshape(codes, [P, G, LINES, 16, 4])
    if KIND.affine:
        offset = offsets(data_ptr, panel, group, groups, lane, there, KIND)
        offset = tl.reshape(offset, [P, G, 1, 16, 1])
    if KIND.bits == 8:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
        if KIND.affine:
            values = values * scale + (offset + 128.0 * scale)
        else:
            values *= scale
        tile = tl.permute(values.to(tl.float16), [1, 2, 4, 0, 3])
    else:
        low, high = codes & 15, codes >> 4
        if KIND.bits > 4:
            low |= high_bits(data_ptr, start, there, 0, KIND)
            high |= high_bits(data_ptr, start, there, 4, KIND)
        low = code_values(low, table_ptr, KIND)
        high = code_values(high, table_ptr, KIND)
        second_scale = scale
        if KIND.group == 16:
            second_scale = scales(data_ptr, panel, group, groups, lane, 1, there, KIND)
            second_scale = tl.reshape(second_scale, [P, G, 1, 16, 1])
        if KIND.affine:
            low = low * scale + offset
            high = high * scale + offset
        elif KIND.table is None:
            low = low * scale + -KIND.zero * scale
            high = high * second_scale + -KIND.zero * second_scale
        else:
            low *= scale
            high *= scale
        tile = tl.join(low.to(tl.float16), high.to(tl.float16))
        tile = tl.permute(tile, [1, 5, 2, 4, 0, 3])
    return tl.reshape(tile, [G * 32, P * 16])


# one compilation for all numbers of rows
@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    data_ptr: tl.tensor,
    table_ptr: tl.tensor,
    up_data_ptr: tl.tensor,
    up_table_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    up_bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    source_ptr: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    y_stride: tl.tensor,
    bias_stride: tl.tensor,
    cap: tl.tensor,
    BIAS: tl.constexpr,
    ROW_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    UP_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    ADD: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOURCES: tl.constexpr,
    BACK: tl.constexpr,
    KIND: tl.constexpr,
    UP_KIND: tl.constexpr,
    ROWS: tl.constexpr,
    PANELS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Compute 16 * PANELS outputs of ROWS rows, as `rows_kernel` writes them.

    The grid counts panels, then rows. Rows of y are `y_stride` numbers apart. See
    `epilogue` for the rest.

    Args:
        ROW_BIAS: whether each row has biases of its own, `bias_stride` numbers apart.
        EXPERTS: whether the grid counts tiles of experts in place of rows: an expert, its first
            slot and its number of slots, up to ROWS; see `product_kernel`.
        SOURCES: whether the rows of slots are named; else slots are rows.
        BACK: whether results go to the places of the named rows.
    """
    panel = tl.program_id(0) * PANELS + tl.arange(0, PANELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    panels = tl.cdiv(outputs, 16)
    groups = inputs // 32
    known = row < rows
    source = row
    if EXPERTS:
        tile_ptr += tl.program_id(1) * 3
        count = tl.load(tile_ptr + 2)
        if count == 0:
            return
        expert = tl.load(tile_ptr)
        data_ptr += panel_start(expert * panels, groups, KIND, 1)
        if GATED:
            up_data_ptr += panel_start(expert * panels, groups, UP_KIND, 1)
        bias_ptr += expert * outputs
        up_bias_ptr += expert * outputs
        row = tl.load(tile_ptr + 1) + tl.arange(0, ROWS)
        known = tl.arange(0, ROWS) < count
        # one that is not there is read, and not stored
        source = tl.where(known, row, tl.load(tile_ptr + 1))
        if SOURCES:
            source = tl.load(source_ptr + source)
    first_input = source * inputs
    acc = tl.zeros([ROWS, PANELS * 16], tl.float32)
    up = tl.zeros([ROWS, PANELS * 16], tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        k = first * 32 + tl.arange(0, GROUPS * 32)
        inside = (k < inputs)[None, :]
        if not EXPERTS:
            inside &= known[:, None]
        x = tl.load(x_ptr + (first_input[:, None] + k[None, :]), mask=inside, other=0.0)
        w = weight_tile(data_ptr, table_ptr, panel, group, panels, groups, KIND)
        acc = tl.dot(x, w, acc)
        if GATED:
            w = weight_tile(up_data_ptr, up_table_ptr, panel, group, panels, groups, UP_KIND)
            up = tl.dot(x, w, up)
    scale = tl.load(scale_ptr + source, mask=known, other=0.0)[:, None]
    output = tl.program_id(0) * PANELS * 16 + tl.arange(0, PANELS * 16)
    at, of_bias = output[None, :], (output < outputs)[None, :]
    if ROW_BIAS:
        at, of_bias = row[:, None] * bias_stride + at, of_bias & known[:, None]
    # no product is left that could become one operation with an addition behind it: rows have the
    # same bits with biases of 0 and without biases
    y = epilogue(
        tl.fma(acc, scale, 0.0),
        tl.fma(up, scale, 0.0),
        bias_ptr,
        up_bias_ptr,
        at,
        of_bias,
        cap,
        BIAS,
        ACTIVATION,
        GATED,
        UP_BIAS,
        CAP,
    )
    there = known[:, None] & (output < outputs)[None, :]
    if BACK:
        row = source
    place = row[:, None].to(tl.int64) * y_stride + output[None, :]
    if ADD:
        y += tl.load(y_ptr + place, mask=there, other=0.0)
    tl.store(y_ptr + place, y, mask=there)
