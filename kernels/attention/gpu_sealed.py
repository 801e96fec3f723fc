"""Attention over int8 rows and sealed blocks in Triton (`sealed_blocks.py`), for `gpu.py`.

A tile's rows see the sealed blocks first, and then the rows of the first block and the last ones.
Where a tile lies across the end of a block, its first rows read the block before the last as rows,
and the others as sealed; both loops have it then, each for its rows. Codes are exact in halves.
Keys by channel are codes times `half` in halves. The middles, which may be far larger and are
exact, are a product of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgellm.kernels.attention.gpu_tiles import JOB_FIELDS, Work
from edgellm.kernels.gpu.device import aligned
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.elementwise import soft_capped, softened
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, SealedPlace
from edgellm.kernels.kv_blocks import BLOCK


@triton.jit
def coded_keys(
    k_ptr: tl.tensor,
    first: tl.tensor,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Load KEYS keys from row `first` of a head's block on, `[WIDTH, KEYS]`; rows have ROW bytes.

    A byte has one code, or one of each of 2 PARTS, which stand one behind the other, padded.
    """
    PANELS: tl.constexpr = KEYS // 16
    panel = first // 16 + tl.arange(0, PANELS)
    e = tl.arange(0, WIDTH * 16)
    within = e % (WIDTH * 16 // PARTS)
    offset = panel[:, None] * (16 * ROW) + within[None, :]
    codes = tl.load(k_ptr + offset, mask=(within < 16 * ROW)[None, :], other=0)
    if PARTS == 2:
        shift = (e // (WIDTH * 8) * 4).to(tl.uint8)
        codes = (codes >> shift[None, :]) & 15
    codes = tl.reshape(codes, [PANELS, WIDTH // 4, 16, 4])
    return tl.reshape(tl.permute(codes, [1, 3, 0, 2]), [WIDTH, PANELS * 16])


@triton.jit
def coded_values(
    v_ptr: tl.tensor,
    first: tl.tensor,
    ROW: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Load KEYS values from row `first` of a head's block on, `[KEYS, WIDTH]`; rows have ROW bytes.

    PARTS of PART numbers stand one behind the other, padded. A byte has one number of each, or one
    number in all where BITS is 8.
    """
    QUADS: tl.constexpr = KEYS // 4
    quad = first // 4 + tl.arange(0, QUADS)
    e = tl.arange(0, WIDTH * 4)
    part, within = e // (WIDTH * 4 // PARTS), e % (WIDTH * 4 // PARTS)
    at = within
    if BITS == 8:
        at += part * (4 * PART)
    offset = quad[:, None] * (4 * ROW) + at[None, :]
    codes = tl.load(v_ptr + offset, mask=(within < 4 * PART)[None, :], other=0)
    if BITS < 8:
        codes = (codes >> (part * BITS).to(tl.uint8)[None, :]) & ((1 << BITS) - 1)
    codes = tl.reshape(codes, [QUADS, WIDTH, 4])
    return tl.reshape(tl.permute(codes, [0, 2, 1]), [QUADS * 4, WIDTH])


@triton.jit
def odd(codes: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the odd numbers that codes stand for."""
    return (codes.to(tl.int32) * 2 - ((1 << BITS) - 1)).to(tl.float16)


@triton.jit
def in_halves(q: tl.tensor) -> tl.tensor:
    """Return queries `[R, D]` in halves, and what their scores are multiplied by."""
    size = tl.max(tl.abs(q), axis=1)
    return (q / tl.where(size > 0, size, 1.0)[:, None]).to(tl.float16), size


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def sealed_attention_kernel(
    q_ptr: tl.tensor,
    plain_ptr: tl.tensor,
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
    job_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    table_stride: tl.tensor,
    kv_heads: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CAP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute the partial results of one split for a tile of queries and a KV head.

    The grid and the results are those of `attention_kernel`. WIDTH is HEAD_DIM, padded.
    """
    BY_CHANNEL: tl.constexpr = KEY_BITS < 8
    KEY_PARTS: tl.constexpr = 8 // KEY_BITS
    KEY_ROW: tl.constexpr = HEAD_DIM // KEY_PARTS
    PARTS: tl.constexpr = 8 // VALUE_BITS
    PART: tl.constexpr = HEAD_DIM // PARTS
    SCALES: tl.constexpr = 2 if VALUE_BITS == 2 else 1
    LOG2_E: tl.constexpr = 1.4426950408889634  # exp2 takes the place of exp
    allow_next(EARLY)
    wait_for_last(EARLY)
    kv_head = tl.program_id(1)
    job_ptr += tl.program_id(0) * FIELDS
    first_row, tokens = tl.load(job_ptr), tl.load(job_ptr + 1)
    start, table = tl.load(job_ptr + 2), tl.load(job_ptr + 3)
    first_query, split = tl.load(job_ptr + 4), tl.load(job_ptr + 5)
    splits = tl.load(job_ptr + 6)
    if tokens == 0:
        return
    table_ptr += table * table_stride
    sealed_table_ptr += table * table_stride
    r = first_query + tl.arange(0, ROWS)
    there = r < tokens * GROUP
    position = start + r // GROUP
    heads = kv_heads * GROUP
    query = (first_row + r // GROUP) * heads + kv_head * GROUP + r % GROUP
    if not CAP:
        scale *= LOG2_E

    # the keys that any query of this tile sees, in tiles, and this split's share of them
    first_token = first_query // GROUP
    last_token = tl.minimum((first_query + ROWS - 1) // GROUP, tokens - 1)
    end = start + last_token + 1
    share = tl.cdiv(tl.cdiv(end, KEYS), splits) * KEYS
    begin = split * share
    end = tl.minimum(end, begin + share)
    # the number behind the last sealed block, of each row and of the first and the last one
    sealed = tl.maximum(position // BLOCK - 1, 1)
    first_sealed = tl.maximum((start + first_token) // BLOCK - 1, 1)
    last_sealed = tl.maximum((start + last_token) // BLOCK - 1, 1)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    c = tl.arange(0, WIDTH)
    # numbers of a key in the order of its parts
    key_at = c // (WIDTH // KEY_PARTS) * KEY_ROW + c % (WIDTH // KEY_PARTS)
    key_inside = c % (WIDTH // KEY_PARTS) < KEY_ROW
    at = query[:, None] * HEAD_DIM + key_at[None, :]
    inside = there[:, None] & key_inside[None, :]
    if BY_CHANNEL:
        q_ptr, plain_ptr = plain_ptr, q_ptr
    q, size = in_halves(tl.load(q_ptr + at, mask=inside, other=0.0))
    size *= scale
    one = (tl.arange(0, 16) == 0)[None, :]
    for first in range(tl.maximum(begin, BLOCK), tl.minimum(end, last_sealed * BLOCK), KEYS):
        block = tl.load(sealed_table_ptr + first // BLOCK)
        place = (block * layers + layer) * kv_heads + kv_head
        row = first % BLOCK
        j = row + tl.arange(0, KEYS)
        codes_ptr = sealed_k_ptr + place * (BLOCK * KEY_ROW)
        codes = coded_keys(codes_ptr, row, KEY_ROW, WIDTH, KEYS, KEY_PARTS)
        if BY_CHANNEL:
            line_ptr = sealed_k_scale_ptr + place * (2 * HEAD_DIM) + key_at
            half = tl.load(line_ptr, mask=key_inside, other=0.0)
            middle = tl.load(line_ptr + HEAD_DIM, mask=key_inside, other=0.0)[:, None]
            middle = tl.where(one, middle, tl.zeros([WIDTH, 16], tl.float16))
            score = tl.dot(q, odd(codes, KEY_BITS) * half[:, None])
            score = (score + tl.sum(tl.dot(q, middle), axis=1)[:, None]) * size[:, None]
        else:
            k_scale = tl.load(sealed_k_scale_ptr + place * BLOCK + j).to(tl.float32)
            score = tl.dot(q, codes.to(tl.float16)) * size[:, None] * k_scale[None, :]
        if CAP:
            score = soft_capped(score, cap) * LOG2_E
        score = tl.where((first // BLOCK < sealed)[:, None], score, float("-inf"))
        p, keep, largest, weight = softened(score, largest, weight)
        codes_ptr = sealed_v_ptr + place * (BLOCK * PART)
        codes = coded_values(codes_ptr, row, PART, PART, WIDTH, KEYS, PARTS, VALUE_BITS)
        values = odd(codes, VALUE_BITS)
        scale_ptr = sealed_v_scale_ptr + place * (SCALES * BLOCK) + j
        v_scale = tl.load(scale_ptr).to(tl.float32)
        if SCALES == 2:
            other = tl.load(scale_ptr + BLOCK).to(tl.float32)
            v_size = tl.max(tl.maximum(v_scale, other), axis=0)
            v_scale = tl.where((c < WIDTH // 2)[None, :], v_scale[:, None], other[:, None])
            values *= (v_scale / tl.where(v_size > 0, v_size, 1.0)).to(tl.float16)
        else:
            v_size = tl.max(v_scale, axis=0)
            p *= (v_scale / tl.where(v_size > 0, v_size, 1.0))[None, :]
        sums = sums * keep[:, None] + tl.dot(p.to(tl.float16), values) * v_size

    if BY_CHANNEL:
        at = query[:, None] * HEAD_DIM + c[None, :]
        inside = there[:, None] & (c < HEAD_DIM)[None, :]
        q, size = in_halves(tl.load(plain_ptr + at, mask=inside, other=0.0))
        size *= scale
    # keys of the first block, and behind a gap those that the first row reads as rows
    gap = (first_sealed - 1) * BLOCK
    low = tl.where(begin < BLOCK, begin, tl.maximum(begin - gap, BLOCK))
    for number in range(low, tl.maximum(tl.minimum(end, BLOCK), end - gap), KEYS):
        first = tl.where(number < BLOCK, number, number + gap)
        block = tl.load(table_ptr + first // BLOCK)
        place = (block * layers + layer) * kv_heads + kv_head
        row = first % BLOCK
        key = first + tl.arange(0, KEYS)
        written = key < end
        at_scale = place * BLOCK + row + tl.arange(0, KEYS)
        codes = coded_keys(k_ptr + place * (BLOCK * HEAD_DIM), row, HEAD_DIM, WIDTH, KEYS, 1)
        score = tl.dot(q, codes.to(tl.float16)) * size[:, None]
        score *= tl.load(k_scale_ptr + at_scale, mask=written, other=0.0)[None, :]
        if CAP:
            score = soft_capped(score, cap) * LOG2_E
        as_rows = (first < BLOCK) | (first // BLOCK >= sealed)
        seen = as_rows[:, None] & (key[None, :] <= position[:, None]) & written[None, :]
        score = tl.where(seen, score, float("-inf"))
        p, keep, largest, weight = softened(score, largest, weight)
        codes_ptr = v_ptr + place * (BLOCK * HEAD_DIM)
        values = coded_values(codes_ptr, row, HEAD_DIM, PART, WIDTH, KEYS, PARTS, 8)
        v_scale = tl.load(v_scale_ptr + at_scale, mask=written, other=0.0)
        v_size = tl.max(v_scale, axis=0)
        p *= (v_scale / tl.where(v_size > 0, v_size, 1.0))[None, :]
        sums = sums * keep[:, None] + tl.dot(p.to(tl.float16), values.to(tl.float16)) * v_size

    # loaded behind the loops, so that it takes no register there
    out = (tl.load(job_ptr + 7) + split * tokens) * heads + query
    value_at = c // (WIDTH // PARTS) * PART + c % (WIDTH // PARTS)
    inside = there[:, None] & (c % (WIDTH // PARTS) < PART)[None, :]
    at = out[:, None].to(tl.int64) * HEAD_DIM + value_at[None, :]
    tl.store(sums_ptr + at, sums, mask=inside)
    tl.store(largest_ptr + out, largest, mask=there)
    tl.store(weight_ptr + out, weight, mask=there)


def attend_sealed(
    blocks: DeviceBlocks,
    tables: torch.Tensor,
    sealed: SealedPlace,
    layer: int,
    q: torch.Tensor,
    plain: torch.Tensor,
    work: Work,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    scale: float,
    softcap: float | None,
    keys: int,
) -> None:
    """Compute the partial results of `attend` in `gpu.py`, whose arguments these are.

    Args:
        plain: queries before the Hadamard transform.
        partials: buffers of `Partials`.
        keys: number of keys in a tile.
    """
    host, bits = blocks.host, sealed.sealing
    k = sealed.blocks.k if bits.channels else sealed.blocks.k.view(torch.int8)
    width = max(16, aligned(host.head_dim))
    wide = work.tile * width >= 4096
    if not bits.channels and width == 64 and not wide:
        keys = 32  # with 64 keys of rows, four warps spill 16 bytes on sm_90, and eight 8 on sm_80
    sealed_attention_kernel[(len(work.jobs), host.kv_heads)](
        q,
        plain,
        blocks.k,
        blocks.v,
        blocks.k_scale,
        blocks.v_scale,
        k,
        sealed.blocks.v,
        sealed.blocks.k_scale,
        sealed.blocks.v_scale,
        tables,
        sealed.tables,
        work.jobs,
        *partials,
        tables.stride(0),
        host.kv_heads,
        layer,
        host.layers,
        scale,
        0.0 if softcap is None else softcap,
        GROUP=q.shape[1] // host.kv_heads,
        HEAD_DIM=host.head_dim,
        KEY_BITS=bits.key_bits,
        VALUE_BITS=bits.value_bits,
        CAP=softcap is not None,
        WIDTH=width,
        ROWS=work.tile,
        KEYS=keys,
        BLOCK=BLOCK,
        FIELDS=JOB_FIELDS,
        num_warps=8 if wide else 4,
        **early(),
    )
