"""Product of up to 32 coded rows and packed weights, in Triton; `gpu.py` calls it.

A weight is read once for all rows, and a warp multiplies a group of 16 outputs by 8 rows with one
instruction. A program has some panels; its warps divide the groups among them, and their sums are
added at the end in the same order however many rows a tile has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgellm.kernels.gpu.early import allow_next, prefetch, wait_for_last
from edgellm.kernels.linear.gpu_fragments import (
    code_bytes,
    half_multiplied,
    later_scales,
    loaded_group,
    multiplied,
    nothing,
    table_words,
    two_offsets,
    two_scales,
    words,
)
from edgellm.kernels.linear.gpu_gemm import epilogue
from edgellm.kernels.linear.gpu_packed import group_offset, panel_start, run_size
from edgellm.kernels.linear.gpu_rows import store_rows


@triton.jit
def loaded_rows(
    first: tl.tensor,
    warp: tl.tensor,
    thread: tl.tensor,
    groups: tl.tensor,
    rows: tl.tensor,
    ptrs: tl.tensor,
    places: tl.tensor,
    LATER: tl.constexpr,
    TILE: tl.constexpr,
    SHIFTED: tl.constexpr,
    FINE: tl.constexpr,
    ONE: tl.constexpr,
    SOURCES: tl.constexpr,
) -> tl.tensor:
    """Load group `first` + LATER + `warp` of eight rows; addresses differ by a constant only.

    Args:
        places: offsets of the codes of a row, and of the scales of two, if SOURCES: rows lie
            anywhere then, and in their order otherwise.

    Returns:
        Scales of rows 2 c and 2 c + 1, c = thread % 4; sums of their 32 values, if SHIFTED; codes
        of row thread // 4; what these rounded off, if FINE.
    """
    codes_ptr, rest_ptr, scale_ptr, shift_ptr = ptrs
    quad, row = thread % 4, thread // 4
    inside = first + LATER + warp < groups
    start = TILE * groups + first
    at = start * 8 + (warp * 8 + 2 * quad)
    other = at + 1
    if SOURCES:
        at = first * 8 + (warp * 8 + places[1])
        other = first * 8 + (warp * 8 + places[2])
    raw = nothing()
    raw += (tl.load(scale_ptr + at + LATER * 8, mask=inside, other=0.0),)
    if not ONE:
        raw += (tl.load(scale_ptr + other + LATER * 8, mask=inside, other=0.0),)
    if SHIFTED:
        raw += (tl.load(shift_ptr + at + LATER * 8, mask=inside, other=0.0),)
        if not ONE:
            raw += (tl.load(shift_ptr + other + LATER * 8, mask=inside, other=0.0),)
    wanted = inside & (TILE * 8 + row < rows)
    at = start * 32 + (warp * 32 + quad * 8 + row)
    if SOURCES:
        at = first * 32 + (warp * 32 + places[0])
    raw += (tl.load(codes_ptr + at + LATER * 32, mask=wanted, other=0),)
    if FINE:
        raw += (tl.load(rest_ptr + at + LATER * 32, mask=wanted, other=0),)
    return raw


@triton.jit
def loaded_weights(
    first: tl.tensor,
    warp: tl.tensor,
    thread: tl.tensor,
    groups: tl.tensor,
    panel_ptr: tl.tensor,
    LATER: tl.constexpr,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Load group `first` + LATER + `warp` of a panel; addresses differ by a constant only."""
    inside = first + LATER + warp < groups
    block_ptr = panel_ptr + run_size(warp, KIND, 1) + run_size(first, KIND, 1)
    group_ptr = panel_ptr + group_offset(warp, KIND, 1) + run_size(first, KIND, 1)
    block_ptr += run_size(LATER, KIND, 1)
    group_ptr += run_size(LATER, KIND, 1)
    return loaded_group(group_ptr, block_ptr, thread % 4, thread // 4, inside, KIND)


@triton.jit
def scaled(
    w: tl.tensor, s: tl.tensor, b0: tl.tensor, b1: tl.tensor, KIND: tl.constexpr, ASM: tl.constexpr
) -> tl.tensor:
    """Multiply a group by codes of rows, times the scales of the weight; see `multiplied`."""
    w0, w1, w2, w3 = w
    s0, s1, h0, h1 = s
    if KIND.group == 16:
        d0, d1, d2, d3 = half_multiplied(w0, w1, b0, ASM)
        e0, e1, e2, e3 = half_multiplied(w2, w3, b1, ASM)
        d0, d1 = tl.fma(e0, h0, d0 * s0), tl.fma(e1, h0, d1 * s0)
        d2, d3 = tl.fma(e2, h1, d2 * s1), tl.fma(e3, h1, d3 * s1)
    else:
        UNSIGNED: tl.constexpr = KIND.affine and KIND.bits < 8
        d0, d1, d2, d3 = multiplied(w0, w1, w2, w3, b0, b1, UNSIGNED, ASM)
        d0, d1, d2, d3 = d0 * s0, d1 * s0, d2 * s1, d3 * s1
    return d0, d1, d2, d3


@triton.jit
def product(
    acc: tl.tensor,
    raw: tl.tensor,
    x: tl.tensor,
    quad: tl.tensor,
    table: tl.tensor,
    FIRST: tl.constexpr,
    TILES: tl.constexpr,
    SHIFTED: tl.constexpr,
    FINE: tl.constexpr,
    ONE: tl.constexpr,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Add the products of loaded weights and all tiles of loaded rows to sums.

    Args:
        FIRST: index of the first of TILES elements of `acc`, each of them four sums.
    """
    w = code_bytes(raw, quad, table, KIND, ASM)
    s0, s1 = two_scales(raw, KIND)
    h0, h1 = s0, s1
    if KIND.group == 16:
        h0, h1 = later_scales(raw, KIND)
    EACH: tl.constexpr = 1 if ONE else 2
    CODES: tl.constexpr = EACH * (2 if SHIFTED else 1)
    new = nothing()
    for tile in tl.static_range(TILES):
        a0, a1, a2, a3 = acc[FIRST + tile]
        of = x[tile]
        x0, x1 = of[0], of[EACH - 1]
        b0, b1 = words(of[CODES])
        d0, d1, d2, d3 = scaled(w, (s0, s1, h0, h1), b0, b1, KIND, ASM)
        if FINE:
            r0, r1 = words(of[CODES + 1])
            e0, e1, e2, e3 = scaled(w, (s0, s1, h0, h1), r0, r1, KIND, ASM)
            d0, d1 = tl.fma(e0, 1.0 / 254.0, d0), tl.fma(e1, 1.0 / 254.0, d1)
            d2, d3 = tl.fma(e2, 1.0 / 254.0, d2), tl.fma(e3, 1.0 / 254.0, d3)
        a0, a2 = tl.fma(d0, x0, a0), tl.fma(d2, x0, a2)
        if not ONE:
            a1, a3 = tl.fma(d1, x1, a1), tl.fma(d3, x1, a3)
        if KIND.affine:
            o0, o1 = two_offsets(raw, KIND)
            if KIND.bits == 8:
                o0, o1 = tl.fma(s0, 128.0, o0), tl.fma(s1, 128.0, o1)
            sum0, sum1 = of[EACH], of[2 * EACH - 1]
            a0, a2 = tl.fma(o0, sum0, a0), tl.fma(o1, sum0, a2)
            if not ONE:
                a1, a3 = tl.fma(o0, sum1, a1), tl.fma(o1, sum1, a3)
        new += ((a0, a1, a2, a3),)
    return new


@triton.jit
def loaded_steps(
    first: tl.tensor,
    warp: tl.tensor,
    thread: tl.tensor,
    groups: tl.tensor,
    rows: tl.tensor,
    x_ptrs: tl.tensor,
    places: tl.tensor,
    panel_ptr: tl.tensor,
    up_ptr: tl.tensor,
    GATED: tl.constexpr,
    SHIFTED: tl.constexpr,
    FINE: tl.constexpr,
    ONE: tl.constexpr,
    SOURCES: tl.constexpr,
    KIND: tl.constexpr,
    UP_KIND: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """Load STEPS groups from `first` + `warp` on: weights, second weights, rows of each."""
    raw = nothing()
    for step in tl.static_range(STEPS):
        w = loaded_weights(first, warp, thread, groups, panel_ptr, step * WARPS, KIND)
        u = w
        if GATED:
            u = loaded_weights(first, warp, thread, groups, up_ptr, step * WARPS, UP_KIND)
        x = nothing()
        for tile in tl.static_range(TILES):
            x += (
                loaded_rows(
                    first,
                    warp,
                    thread,
                    groups,
                    rows,
                    x_ptrs,
                    places,
                    step * WARPS,
                    tile,
                    SHIFTED,
                    FINE,
                    ONE,
                    SOURCES,
                ),
            )
        raw += ((w, u, x),)
    return raw


@triton.jit
def total(
    acc: tl.tensor,
    FIRST: tl.constexpr,
    TILES: tl.constexpr,
    PANELS: tl.constexpr,
    WARPS: tl.constexpr,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Add up the sums of each panel's warps, as a tile of rows and outputs `[8 T, 16 P]`."""
    FACTOR: tl.constexpr = (
        1.0 if KIND.affine or KIND.table is not None else 1.0 / (1 << (8 - KIND.bits))
    )
    y = tl.zeros([TILES, 8, PANELS * 16], tl.float32)
    which = tl.arange(0, TILES)[:, None, None]
    for tile in tl.static_range(TILES):
        d0, d1, d2, d3 = acc[FIRST + tile]
        d = tl.reshape(tl.join(tl.join(d0, d1), tl.join(d2, d3)), [PANELS, WARPS, 8, 4, 2, 2])
        # an output is a panel, a pair and the last dimension, a row the others
        d = tl.permute(tl.sum(d, axis=1), [2, 3, 0, 1, 4])
        y = tl.where(which == tile, tl.reshape(d, [1, 8, PANELS * 16]), y)
    return tl.reshape(y, [TILES * 8, PANELS * 16]) * FACTOR


@triton.jit
def source_places(
    source_ptr: tl.tensor, thread: tl.tensor, rows: tl.tensor, groups: tl.tensor
) -> tl.tensor:
    """Return where the rows lie that `source_ptr` names; see `loaded_rows`."""
    quad, row = thread % 4, thread // 4
    codes = tl.load(source_ptr + row, mask=row < rows, other=0)
    first = tl.load(source_ptr + 2 * quad, mask=2 * quad < rows, other=0)
    second = tl.load(source_ptr + 2 * quad + 1, mask=2 * quad + 1 < rows, other=0)
    return (
        codes // 8 * groups * 32 + quad * 8 + codes % 8,
        first // 8 * groups * 8 + first % 8,
        second // 8 * groups * 8 + second % 8,
    )


# one compilation for all numbers of rows
@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    codes_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    data_ptr: tl.tensor,
    table_ptr: tl.tensor,
    up_data_ptr: tl.tensor,
    up_table_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    up_bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    share_ptr: tl.tensor,
    next_norm_ptr: tl.tensor,
    next_codes_ptr: tl.tensor,
    next_rest_ptr: tl.tensor,
    next_scale_ptr: tl.tensor,
    next_shift_ptr: tl.tensor,
    next_squares_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    source_ptr: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    y_stride: tl.tensor,
    bias_stride: tl.tensor,
    epsilon: tl.tensor,
    cap: tl.tensor,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROW_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    UP_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    ADD: tl.constexpr,
    PEAKS: tl.constexpr,
    CODED: tl.constexpr,
    NEXT_NORM: tl.constexpr,
    NEXT_FINE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOURCES: tl.constexpr,
    BACK: tl.constexpr,
    FINE: tl.constexpr,
    ONE: tl.constexpr,
    KIND: tl.constexpr,
    UP_KIND: tl.constexpr,
    TILES: tl.constexpr,
    PANELS: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """Compute 16 * PANELS outputs of up to 8 * TILES rows; the grid counts panels. See `epilogue`.

    Args:
        ROW_BIAS: whether each row has biases of its own, `bias_stride` numbers apart.
        CODED: whether the outputs are written as codes for the next product, too or, unless they
            are added to y, only so; NEXT_NORM, NEXT_FINE: see `store_rows`.
        EXPERTS: whether there are tiles of experts, which the grid counts behind the panels: an
            expert, its first slot and its number of slots, up to 8. Weights have `outputs` for each
            expert, and results are slots or, if BACK, go to the places of the named rows.
        SOURCES: whether the rows of slots are named; else slots are rows, a tile each eight.
        ONE: whether there is a single row.
        WARPS: warps that share a panel.
        STEPS: groups that a warp loads at a time, while it multiplies those before.
        SPAN: power of two from the number of groups on.
    """
    allow_next(EARLY)
    panels, groups = tl.cdiv(outputs, 16), inputs // 32
    each = tl.arange(0, PANELS * WARPS * 32)
    warp, thread = each // 32 % WARPS, each % 32
    # one that is not there is read, and not stored
    panel = tl.minimum(tl.program_id(0) * PANELS + each // (WARPS * 32), panels - 1)
    row = tl.arange(0, TILES * 8)[:, None]
    slot, x_tile = row, 0
    if EXPERTS:
        wait_for_last(EARLY)
        tile_ptr += tl.program_id(1) * 3
        rows = tl.load(tile_ptr + 2)
        if rows == 0:
            return
        expert = tl.load(tile_ptr)
        panel += expert * panels
        bias_ptr, up_bias_ptr = bias_ptr + expert * outputs, up_bias_ptr + expert * outputs
        first_slot = tl.load(tile_ptr + 1)
        slot += first_slot
        x_tile = 0 if SOURCES else first_slot // 8 * groups
    panel_ptr = data_ptr + panel_start(panel, groups, KIND, 1)
    up_ptr = up_data_ptr + panel_start(panel, groups, UP_KIND, 1)
    line = each % (WARPS * 32) * 128
    prefetch(panel_ptr + line % run_size(groups, KIND, 1), EARLY and not EXPERTS)
    if GATED:
        prefetch(up_ptr + line % run_size(groups, UP_KIND, 1), EARLY and not EXPERTS)
    table = table_words(table_ptr, KIND)
    up_table = table_words(up_table_ptr, UP_KIND)
    wait_for_last(EARLY)
    x_ptrs = (
        codes_ptr.to(tl.pointer_type(tl.int64)) + x_tile * 32,
        rest_ptr.to(tl.pointer_type(tl.int64)) + x_tile * 32,
        scale_ptr + x_tile * 8,
        shift_ptr + x_tile * 8,
    )
    places = nothing()
    if SOURCES and not ONE:
        places = source_places(source_ptr + first_slot, thread, rows, groups)
    SHIFTED: tl.constexpr = KIND.affine or UP_KIND.affine
    zero = tl.zeros([PANELS * WARPS * 32], tl.float32)
    acc = nothing()
    for _ in tl.static_range(TILES * (2 if GATED else 1)):
        acc += ((zero, zero, zero, zero),)
    raw = loaded_steps(
        0,
        warp,
        thread,
        groups,
        rows,
        x_ptrs,
        places,
        panel_ptr,
        up_ptr,
        GATED,
        SHIFTED,
        FINE,
        ONE,
        SOURCES and not ONE,
        KIND,
        UP_KIND,
        TILES,
        WARPS,
        STEPS,
    )
    for first in range(0, groups, WARPS * STEPS):
        following = loaded_steps(
            first + WARPS * STEPS,
            warp,
            thread,
            groups,
            rows,
            x_ptrs,
            places,
            panel_ptr,
            up_ptr,
            GATED,
            SHIFTED,
            FINE,
            ONE,
            SOURCES and not ONE,
            KIND,
            UP_KIND,
            TILES,
            WARPS,
            STEPS,
        )
        for step in tl.static_range(STEPS):
            w, u, x = raw[step]
            quad = thread % 4
            new = product(acc, w, x, quad, table, 0, TILES, SHIFTED, FINE, ONE, KIND, ASM)
            if GATED:
                new += product(
                    acc, u, x, quad, up_table, TILES, TILES, SHIFTED, FINE, ONE, UP_KIND, ASM
                )
            acc = new
        raw = following
    y = total(acc, 0, TILES, PANELS, WARPS, KIND)
    second = y
    if GATED:
        second = total(acc, TILES, TILES, PANELS, WARPS, UP_KIND)
    if NORM:
        each = tl.arange(0, SPAN)[None, :]
        source = row
        if SOURCES and not ONE:
            source = tl.load(source_ptr + slot, mask=row < rows, other=0)
        place = (source // 8 * groups + each) * 8 + source % 8
        squares = tl.load(squares_ptr + place, mask=(row < rows) & (each < groups), other=0.0)
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / inputs + epsilon)
        y *= factor[:, None]
        second *= factor[:, None]
    output = tl.program_id(0) * (PANELS * 16) + tl.arange(0, PANELS * 16)[None, :]
    there = (row < rows) & (output < outputs)
    at, of_bias = output, output < outputs
    if ROW_BIAS:
        at, of_bias = row * bias_stride + output, there
    y = epilogue(
        y, second, bias_ptr, up_bias_ptr, at, of_bias, cap, BIAS, ACTIVATION, GATED, UP_BIAS, CAP
    )
    if BACK:
        slot = tl.load(source_ptr + slot, mask=row < rows, other=0)
    place = slot.to(tl.int64) * y_stride + output
    if ADD:
        y += tl.load(y_ptr + place, mask=there, other=0.0)
    if ADD or not CODED:
        tl.store(y_ptr + place, y, mask=there)
    if CODED:
        COUNT: tl.constexpr = TILES * 8 * PANELS // 2
        both = tl.reshape(y, [TILES * 8, PANELS // 2, 32])
        group = tl.program_id(0) * (PANELS // 2) + tl.arange(0, PANELS // 2)[None, :]
        known = (row < rows) & (group < outputs // 32)
        place = (slot // 8 * (outputs // 32) + group) * 8 + slot % 8
        if NEXT_NORM:
            tl.store(next_squares_ptr + place, tl.sum(both * both, axis=2), mask=known)
            y *= tl.load(next_norm_ptr + output, mask=output < outputs, other=0.0)
        store_rows(
            tl.reshape(y, [COUNT, 32]),
            tl.reshape(slot + 0 * group, [COUNT]),
            tl.reshape(group + 0 * row, [COUNT]),
            tl.reshape(known, [COUNT]),
            outputs // 32,
            next_codes_ptr,
            next_rest_ptr,
            next_scale_ptr,
            next_shift_ptr,
            NEXT_FINE,
        )
    if PEAKS:
        y = tl.reshape(tl.where(there, y, float("-inf")), [TILES * 8, PANELS, 16])
        peak = tl.max(y, axis=2)
        each = tl.program_id(0) * PANELS + tl.arange(0, PANELS)[None, :]
        known = (row < rows) & (each < panels)
        tl.store(peak_ptr + row * panels + each, peak, mask=known)
        share = tl.sum(tl.exp(y - peak[:, :, None]), axis=2)
        tl.store(share_ptr + row * panels + each, share, mask=known)
