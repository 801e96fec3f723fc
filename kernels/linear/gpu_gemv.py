"""Product of a single row and packed weights, in Triton; `gpu.py` calls it.

Each weight is read once, four bytes of a panel at a time. Codes become floats without the
conversion instruction, see `code_float`. RMSNorm before the product costs nothing: the root mean
square is a factor of the whole result, and is summed up on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgellm.kernels.linear.gpu_epilogue import epilogue
from edgellm.kernels.linear.gpu_packed import (
    code_float,
    group_start,
    looked_up,
    offsets,
    scales,
)


@triton.jit
def inputs_at(
    x_ptr: tl.tensor, norm_ptr: tl.tensor, k: tl.tensor, inside: tl.tensor, NORM: tl.constexpr
) -> tl.tensor:
    """Load elements `k` of the row, times the weights of the norm if any."""
    x = tl.load(x_ptr + k, mask=inside, other=0.0)
    if NORM:
        x *= tl.load(norm_ptr + k, mask=inside, other=0.0)
    return x


@triton.jit
def with_high_bits(
    words: tl.tensor,
    words_ptr: tl.tensor,
    start: tl.tensor,
    there: tl.tensor,
    QUADS: tl.constexpr,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Return words of four bytes, each byte with a whole code of 5 or 6 bits.

    Args:
        words: nibbles `[P, G, 4, 16]`, of which those of quads QUADS to QUADS + 3 are used.
        start: first word of the groups, `[P, G, 1, 1]`.
        there: mask of the groups to load.
        QUADS: 0 or 4.
    """
    LINE: tl.constexpr = 64 if KIND.bits == 5 else 64 + 4 * QUADS
    quad = tl.arange(0, 4)[None, None, :, None]
    lane = tl.arange(0, 16)[None, None, None, :]
    word = start + LINE + lane + 0 * quad
    high = tl.load(words_ptr + word, mask=there, other=0)
    if KIND.bits == 6:
        high = (high >> 2 * quad & 0x03030303) << 4
    elif QUADS == 0:
        high = high << 4 - quad & 0x10101010
    else:
        high = high >> quad & 0x10101010
    return words >> QUADS & 0x0F0F0F0F | high


@triton.jit
def table_products(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    table_ptr: tl.tensor,
    words: tl.tensor,
    first_k: tl.tensor,
    inside: tl.tensor,
    NORM: tl.constexpr,
) -> tl.tensor:
    """Look the codes of words `[P, G, 4, 16]` up in a table, and sum their products per word."""
    table = tl.load(table_ptr + tl.arange(0, 16))
    total = tl.zeros(words.shape, tl.float32)
    for nibble in tl.static_range(8):
        # the high nibble of a byte is 16 inputs after the low one
        k = first_k + nibble // 2 + nibble % 2 * 16
        x = inputs_at(x_ptr, norm_ptr, k, inside, NORM)
        total += looked_up(table, words >> 4 * nibble & 15) * x[None, :, :, None]
    return total


@triton.jit
def products(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    data_ptr: tl.tensor,
    table_ptr: tl.tensor,
    panel: tl.tensor,
    group: tl.tensor,
    panels: tl.tensor,
    groups: tl.tensor,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Return the summands of panels `[P]` and groups `[G]` for each output: `[P, G, L, 16]`.

    The third dimension counts words of four bytes: eight words for codes of 8 bits, else four
    words with two nibbles in a byte.
    """
    P: tl.constexpr = panel.shape[0]
    G: tl.constexpr = group.shape[0]
    L: tl.constexpr = 8 if KIND.bits == 8 else 4
    words_ptr = data_ptr.to(tl.pointer_type(tl.int32))
    first_k = group[:, None] * 32 + tl.arange(0, L)[None, :] * 4
    inside = (group < groups)[:, None]
    panel, group = panel[:, None, None], group[None, :, None]
    there = (panel < panels) & (group < groups)
    start = group_start(panel, group, groups, KIND, 4)
    words = tl.load(words_ptr + start + tl.arange(0, 16 * L)[None, None, :], mask=there, other=0)
    words = tl.reshape(words, [P, G, L, 16])
    lane = tl.arange(0, 16)[None, None, :]
    if KIND.table is not None:
        scale = scales(data_ptr, panel, group, groups, lane, 0, there, KIND)
        total = table_products(x_ptr, norm_ptr, table_ptr, words, first_k, inside, NORM)
        return total * scale[:, :, None, :]
    if KIND.bits == 8:
        words = words ^ -2139062144  # 0x80808080: signed bytes to 0 .. 255
    first, second = words, words
    if KIND.bits == 5 or KIND.bits == 6:
        start, loaded = start[:, :, :, None], there[:, :, :, None]
        first = with_high_bits(words, words_ptr, start, loaded, 0, KIND)
        second = with_high_bits(words, words_ptr, start, loaded, 4, KIND)
    # first bit of the second quads' codes, and the mask of a code
    NIBBLE: tl.constexpr = 4 if KIND.bits == 4 else 0
    MASK: tl.constexpr = 2**KIND.bits - 1
    total = tl.zeros([P, G, L, 16], tl.float32)
    x_sum = tl.zeros([G, L], tl.float32)
    second_total, second_sum = total, x_sum
    for j in tl.static_range(4):
        x = inputs_at(x_ptr, norm_ptr, first_k + j, inside, NORM)
        x_sum += x
        # byte j, not shifted down: in the lower half of a word it fits into a mantissa
        bits = first >> 16 if j >= 2 else first
        code = code_float(bits & (MASK << 8 * (j % 2)))
        x *= 1.0 / (1 << 8 * (j % 2))
        total += code * x[None, :, :, None]
        if KIND.bits < 8:
            x = inputs_at(x_ptr, norm_ptr, first_k + j + 16, inside, NORM)
            if KIND.group == 16:
                second_sum += x
            else:
                x_sum += x
            bits = second >> 16 if j >= 2 else second
            code = code_float(bits & (MASK << 8 * (j % 2) + NIBBLE))
            x *= 1.0 / (1 << 8 * (j % 2) + NIBBLE)
            if KIND.group == 16:
                second_total += code * x[None, :, :, None]
            else:
                total += code * x[None, :, :, None]
    scale = scales(data_ptr, panel, group, groups, lane, 0, there, KIND)[:, :, None, :]
    if KIND.affine:
        offset = offsets(data_ptr, panel, group, groups, lane, there, KIND)
        total = total * scale + offset[:, :, None, :] * x_sum[None, :, :, None]
    else:
        total = (total - KIND.zero * x_sum[None, :, :, None]) * scale
    if KIND.group == 16:
        scale = scales(data_ptr, panel, group, groups, lane, 1, there, KIND)[:, :, None, :]
        total += (second_total - KIND.zero * second_sum[None, :, :, None]) * scale
    return total


@triton.jit
def gemv_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    data_ptr: tl.tensor,
    table_ptr: tl.tensor,
    up_data_ptr: tl.tensor,
    up_table_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    up_bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    share_ptr: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    epsilon: tl.tensor,
    cap: tl.tensor,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    UP_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    ADD: tl.constexpr,
    PEAKS: tl.constexpr,
    KIND: tl.constexpr,
    UP_KIND: tl.constexpr,
    PANELS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Compute 16 * PANELS outputs of one row; the grid counts panels. See `epilogue`."""
    panel = tl.program_id(0) * PANELS + tl.arange(0, PANELS)
    panels = tl.cdiv(outputs, 16)
    groups = inputs // 32
    acc = tl.zeros([PANELS, GROUPS, 8 if KIND.bits == 8 else 4, 16], tl.float32)
    up = tl.zeros([PANELS, GROUPS, 8 if UP_KIND.bits == 8 else 4, 16], tl.float32)
    squares = tl.zeros([GROUPS * 32], tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        acc += products(
            x_ptr, norm_ptr, data_ptr, table_ptr, panel, group, panels, groups, NORM, KIND
        )
        if GATED:
            up += products(
                x_ptr,
                norm_ptr,
                up_data_ptr,
                up_table_ptr,
                panel,
                group,
                panels,
                groups,
                NORM,
                UP_KIND,
            )
        if NORM:
            k = first * 32 + tl.arange(0, GROUPS * 32)
            x = tl.load(x_ptr + k, mask=k < inputs, other=0.0)
            squares += x * x
    y = tl.sum(tl.sum(acc, axis=2), axis=1)
    second = y
    if GATED:
        second = tl.sum(tl.sum(up, axis=2), axis=1)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / inputs + epsilon)
        y *= factor
        second *= factor
    output = panel[:, None] * 16 + tl.arange(0, 16)[None, :]
    y = epilogue(
        y,
        second,
        bias_ptr,
        up_bias_ptr,
        output,
        outputs,
        cap,
        BIAS,
        ACTIVATION,
        GATED,
        UP_BIAS,
        CAP,
    )
    if ADD:
        y += tl.load(y_ptr + output, mask=output < outputs, other=0.0)
    tl.store(y_ptr + output, y, mask=output < outputs)
    if PEAKS:
        y = tl.where(output < outputs, y, float("-inf"))
        peak = tl.max(y, axis=1)
        tl.store(peak_ptr + panel, peak, mask=panel < panels)
        share = tl.sum(tl.exp(y - peak[:, None]), axis=1)
        tl.store(share_ptr + panel, share, mask=panel < panels)
