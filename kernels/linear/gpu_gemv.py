"""One row times int4 or int8 panels, in Triton; `gpu.py` calls it.

Each weight is read once, four bytes of a panel at a time. No integer is turned into a float with
the conversion instruction, which runs at an eighth of the rate of an addition: a code is put into
the low bits of a float's mantissa instead, `2^23 + code`, and `2^23` taken away. RMSNorm before the
product costs nothing: the root mean square is a factor of the whole result, and is summed up on the
way.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def products(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    words_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    panel: tl.tensor,
    group: tl.tensor,
    panels: tl.tensor,
    groups: tl.tensor,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    AFFINE: tl.constexpr,
) -> tl.tensor:
    """What panels `[P]` and groups `[G]` add to each output: `[P, G, BITS, 16]`, not yet summed.

    The third dimension counts words of four inputs: four of them for int4, which has two codes in a
    byte, and eight for int8.
    """
    CODE_WORDS: tl.constexpr = 16 * BITS
    # scale, and offset: 16 halves each
    RECORD_HALVES: tl.constexpr = 2 * CODE_WORDS + (32 if AFFINE else 16)
    MAGIC: tl.constexpr = 0x4B000000  # 2^23 as a float
    record = panel[:, None].to(tl.int64) * groups + group[None, :]
    there = (panel < panels)[:, None] & (group < groups)[None, :]
    word = record[:, :, None] * (RECORD_HALVES // 2) + tl.arange(0, CODE_WORDS)[None, None, :]
    words = tl.load(words_ptr + word, mask=there[:, :, None], other=0)
    words = tl.reshape(words, [words.shape[0], words.shape[1], BITS, 16])
    if BITS == 8:
        words = words ^ -2139062144  # 0x80808080: signed bytes to 0 .. 255
    total = tl.zeros([words.shape[0], words.shape[1], BITS, 16], tl.float32)
    x_sum = tl.zeros([words.shape[1], BITS], tl.float32)
    inside = (group < groups)[:, None]
    for j in tl.static_range(4):
        k = group[:, None] * 32 + tl.arange(0, BITS)[None, :] * 4 + j
        # byte j, where it lies: in the lower half of a word it fits into a mantissa
        bits = words >> 16 if j >= 2 else words
        x = tl.load(x_ptr + k, mask=inside, other=0.0)
        if NORM:
            x *= tl.load(norm_ptr + k, mask=inside, other=0.0)
        x_sum += x
        mask = bits & ((15 if BITS == 4 else 255) << (8 * (j % 2)))
        code = (mask | MAGIC).to(tl.float32, bitcast=True) - 8388608.0
        total += code * (x * (1.0 / (1 << (8 * (j % 2)))))[None, :, :, None]
        if BITS == 4:
            x = tl.load(x_ptr + k + 16, mask=inside, other=0.0)
            if NORM:
                x *= tl.load(norm_ptr + k + 16, mask=inside, other=0.0)
            x_sum += x
            mask = bits & (15 << (8 * (j % 2) + 4))
            code = (mask | MAGIC).to(tl.float32, bitcast=True) - 8388608.0
            total += code * (x * (1.0 / (16 << (8 * (j % 2)))))[None, :, :, None]
    half = record[:, :, None] * RECORD_HALVES + 2 * CODE_WORDS + tl.arange(0, 16)[None, None, :]
    scale = tl.load(halves_ptr + half, mask=there[:, :, None], other=0.0).to(tl.float32)
    if AFFINE:
        offset = tl.load(halves_ptr + half + 16, mask=there[:, :, None], other=0.0).to(tl.float32)
        total = total * scale[:, :, None, :] + offset[:, :, None, :] * x_sum[None, :, :, None]
    else:
        zero = 8.0 if BITS == 4 else 128.0
        total = (total - zero * x_sum[None, :, :, None]) * scale[:, :, None, :]
    return total


@triton.jit
def gemv_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    words_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    up_words_ptr: tl.tensor,
    up_halves_ptr: tl.tensor,
    y_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    share_ptr: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    epsilon: tl.tensor,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PEAKS: tl.constexpr,
    BITS: tl.constexpr,
    AFFINE: tl.constexpr,
    UP_AFFINE: tl.constexpr,
    PANELS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """16 * PANELS outputs of one row; the grid counts through the panels."""
    panel = tl.program_id(0) * PANELS + tl.arange(0, PANELS)
    panels = tl.cdiv(outputs, 16)
    groups = inputs // 32
    acc = tl.zeros([PANELS, GROUPS, BITS, 16], tl.float32)
    up = tl.zeros([PANELS, GROUPS, BITS, 16], tl.float32)
    squares = tl.zeros([GROUPS * 32], tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        acc += products(
            x_ptr, norm_ptr, words_ptr, halves_ptr, panel, group, panels, groups, NORM, BITS, AFFINE
        )
        if GATED:
            up += products(
                x_ptr,
                norm_ptr,
                up_words_ptr,
                up_halves_ptr,
                panel,
                group,
                panels,
                groups,
                NORM,
                BITS,
                UP_AFFINE,
            )
        if NORM:
            k = first * 32 + tl.arange(0, GROUPS * 32)
            x = tl.load(x_ptr + k, mask=k < inputs, other=0.0)
            squares += x * x
    y = tl.sum(tl.sum(acc, axis=2), axis=1)
    factor = 1.0
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / inputs + epsilon)
        y *= factor
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * (tl.sum(tl.sum(up, axis=2), axis=1) * factor)
    output = panel[:, None] * 16 + tl.arange(0, 16)[None, :]
    if ADD:
        y += tl.load(y_ptr + output, mask=output < outputs, other=0.0)
    tl.store(y_ptr + output, y, mask=output < outputs)
    if PEAKS:
        y = tl.where(output < outputs, y, float("-inf"))
        peak = tl.max(y, axis=1)
        tl.store(peak_ptr + panel, peak, mask=panel < panels)
        share = tl.sum(tl.exp(y - peak[:, None]), axis=1)
        tl.store(share_ptr + panel, share, mask=panel < panels)
