"""Attention over KV blocks in Triton: one kernel for a token, some tokens and a chunk of a prompt.

The queries of a KV head and span, `tokens x group` of them, are rows of tiles. Keys are read 32 or
64 at a time through the block table, straight from the layout of the KV cache. They are divided
among splits, and each split writes its sum, largest score and weight (flash-decoding, Dao et al.,
2023); `combine_kernel` adds these up. Device memory tells each tile its sequence and length
(`gpu_tiles.py`), so that a captured CUDA graph serves every step. Products run on tensor cores in
halves. Codes are exact in halves; queries are divided by their largest element and value scales by
the largest of their tile, so that no product overflows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgellm.kernels.attention.gpu_rows import (
    factors,
    in_parts,
    key_tile,
    products,
    query_tile,
    value_tile,
    with_values,
)
from edgellm.kernels.attention.gpu_sealed import over_sealed
from edgellm.kernels.attention.gpu_tiles import (
    JOB_FIELDS,
    ROW_FIELDS,
    ROWS,
    SPLITS,
    Tiling,
    Work,
)
from edgellm.kernels.gpu.device import aligned
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.elementwise import soft_capped, softened
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, SealedPlace
from edgellm.kernels.hadamard.gpu import spread
from edgellm.kernels.kv_append.gpu import hadamard_size
from edgellm.kernels.kv_blocks import BLOCK, SEALED
from edgellm.kernels.linear.gpu_rows import CodedRows, row_pointers, store_part
from edgellm.kernels.quantized import GROUP


@dataclass(frozen=True)
class Partials:
    """Buffers for partial results of splits: sums, largest scores and weights.

    Calls have rows of them, side by side: one of a token, one of its splits, and a head. A row has
    the width of a value in `sums`.
    """

    sums: torch.Tensor
    largest: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def empty(
        cls, *, tokens: int, kinds: Collection[tuple[int, int, int]], device: str
    ) -> Partials:
        """Allocate buffers for up to `tokens` tokens of any number of sequences.

        Args:
            kinds: heads, KV heads and width of a value of each layer.
        """
        # one split of each token, or SPLITS full tiles where keys are split
        rows = [
            heads * (tokens + -(-SPLITS * ROWS * kv_heads // heads)) for heads, kv_heads, _ in kinds
        ]
        widths = [width for *_, width in kinds]
        return cls(
            torch.empty(
                max(n * width for n, width in zip(rows, widths, strict=True)), device=device
            ),
            torch.empty(max(rows), device=device),
            torch.empty(max(rows), device=device),
        )


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def attention_kernel(
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
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    FORMAT: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CAP: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute the partial results of one split for a tile of queries and a KV head.

    The grid counts jobs, see `Work`, and KV heads. WIDTH is the padded width of a cached value,
    KEY_WIDTH that of a key. LATENT is the width of latents, which are values and, behind what K
    has, the rest of the keys; or 0. FORMAT is that of rows; KEY_BITS and VALUE_BITS those of sealed
    blocks, or 0 and 8. `plain` has the queries before the Hadamard transform.
    """
    SCALED: tl.constexpr = FORMAT == "int8"
    VALUE_DIM: tl.constexpr = LATENT if LATENT > 0 else HEAD_DIM
    PARTS: tl.constexpr = 8 // VALUE_BITS
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
    begin = tl.maximum(start + first_token - window + 1, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), splits) * KEYS
    begin += split * share
    end = tl.minimum(end, begin + share)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    low, high = begin, end
    if KEY_BITS > 0:
        # the number behind the last sealed block, of each row and of the first and the last one
        sealed = tl.maximum(position // BLOCK - 1, 1)
        first_sealed = tl.maximum((start + first_token) // BLOCK - 1, 1)
        last_sealed = tl.maximum((start + last_token) // BLOCK - 1, 1)
        largest, weight, sums = over_sealed(
            plain_ptr if KEY_BITS < 8 else q_ptr,
            (sealed_k_ptr, sealed_v_ptr, sealed_k_scale_ptr, sealed_v_scale_ptr),
            sealed_table_ptr + table * table_stride,
            query,
            there,
            (tl.maximum(begin, BLOCK), tl.minimum(end, last_sealed * BLOCK)),
            sealed,
            (kv_head, kv_heads, layer, layers),
            scale,
            cap,
            (largest, weight, sums),
            HEAD_DIM,
            KEY_BITS,
            VALUE_BITS,
            CAP,
            WIDTH,
            KEYS,
            BLOCK,
        )
        # keys of the first block, and behind a gap those that the first row reads as rows
        gap = (first_sealed - 1) * BLOCK
        low = tl.where(begin < BLOCK, begin, tl.maximum(begin - gap, BLOCK))
        high = tl.maximum(tl.minimum(end, BLOCK), end - gap)

    e = tl.arange(0, KEY_WIDTH)
    at = query[:, None] * (HEAD_DIM + LATENT) + e[None, :]
    q, factor = query_tile(q_ptr, at, there[:, None] & (e < HEAD_DIM)[None, :], FORMAT)
    factor *= scale
    if LATENT > 0:
        e = tl.arange(0, WIDTH)
        at = query[:, None] * (HEAD_DIM + LATENT) + HEAD_DIM + e[None, :]
        inside = there[:, None] & (e < LATENT)[None, :]
        latent_q, latent_factor = query_tile(q_ptr, at, inside, FORMAT)
        latent_factor *= scale
    for number in range(low, high, KEYS):
        first = number
        if KEY_BITS > 0:
            first = tl.where(number < BLOCK, number, number + gap)
        block = tl.load(table_ptr + first // BLOCK)
        place = (block * layers + layer) * kv_heads + kv_head
        row = first % BLOCK
        key = first + tl.arange(0, KEYS)
        codes = key_tile(k_ptr + place * (BLOCK * HEAD_DIM), row, HEAD_DIM, KEY_WIDTH, KEYS, 1)
        score = products(q, factors(codes, FORMAT), FORMAT) * factor[:, None]
        at_scale = place * BLOCK + row + tl.arange(0, KEYS)
        written = key < end
        if SCALED:
            score *= tl.load(k_scale_ptr + at_scale, mask=written, other=0.0)[None, :]
        codes_ptr = v_ptr + place * (BLOCK * VALUE_DIM)
        if LATENT > 0:
            codes = value_tile(codes_ptr, row, LATENT, WIDTH, KEYS, 1, 0)
            if not SCALED:
                codes = tl.where(written[:, None], codes, 0.0)
            values = factors(codes, FORMAT)
            rest = products(latent_q, tl.trans(values), FORMAT) * latent_factor[:, None]
            if SCALED:
                rest *= tl.load(v_scale_ptr + at_scale, mask=written, other=0.0)[None, :]
            score += rest
        if CAP:
            score = soft_capped(score, cap) * LOG2_E
        seen = (key[None, :] <= position[:, None]) & written[None, :]
        if KEY_BITS > 0:
            seen &= ((first < BLOCK) | (first // BLOCK >= sealed))[:, None]
        else:
            seen &= key[None, :] > position[:, None] - window
        score = tl.where(seen, score, float("-inf"))
        p, keep, largest, weight = softened(score, largest, weight)
        if LATENT == 0:
            codes = value_tile(codes_ptr, row, HEAD_DIM, WIDTH, KEYS, PARTS, 0)
            if not SCALED:
                # rows that were never written may be NaN, and 0 * NaN is NaN
                codes = tl.where(written[:, None], codes, 0.0)
            values = factors(codes, FORMAT)
        if SCALED:
            v_scale = tl.load(v_scale_ptr + at_scale, mask=written, other=0.0)
            sums = with_values(sums, keep, p, values, v_scale)
        else:
            sums = sums * keep[:, None] + products(factors(p, FORMAT), values, FORMAT)

    # loaded behind the loop, so that it takes no register there
    out = (tl.load(job_ptr + 7) + split * tokens) * heads + query
    value_at, value_inside = in_parts(WIDTH, VALUE_DIM, PARTS)
    at = out[:, None].to(tl.int64) * VALUE_DIM + value_at[None, :]
    tl.store(sums_ptr + at, sums, mask=there[:, None] & value_inside[None, :])
    tl.store(largest_ptr + out, largest, mask=there)
    tl.store(weight_ptr + out, weight, mask=there)


@triton.jit
def combine_kernel(
    sums_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    out_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    row_ptr: tl.tensor,
    heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HADAMARD: tl.constexpr,
    SINKS: tl.constexpr,
    GATED: tl.constexpr,
    CODED: tl.constexpr,
    FIELDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Add up the splits of one token and head; the grid counts tokens x heads, see `Work.rows`.

    Results are floats or, where CODED, codes as `store_rows` writes them.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    row_ptr += token * FIELDS
    first, splits, tokens = tl.load(row_ptr + 2), tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    d = tl.arange(0, WIDTH)
    largest = float("-inf")
    weight = 0.0
    if SINKS:
        largest = tl.load(sink_ptr + head) * 1.4426950408889634  # as the scores, for exp2
        weight = 1.0
    total = tl.zeros([WIDTH], tl.float32)
    for split in range(splits):
        at = (first + split * tokens).to(tl.int64) * heads + head
        score = tl.load(largest_ptr + at)
        now = tl.maximum(largest, score)
        safe = tl.where(now == float("-inf"), 0.0, now)
        keep, share = tl.exp2(largest - safe), tl.exp2(score - safe)
        part = tl.load(sums_ptr + at * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        total = total * keep + part * share
        weight = weight * keep + tl.load(weight_ptr + at) * share
        largest = now
    total /= weight
    if HADAMARD > 0:
        total = spread(total, HADAMARD)
    if GATED:
        gate = tl.load(gate_ptr + row * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        total /= 1.0 + tl.exp(-gate)
    ptrs = out_ptr, codes_ptr, scale_ptr, shift_ptr
    at, size = head.to(tl.int32) * HEAD_DIM, heads * HEAD_DIM
    store_part(total, token.to(tl.int32), at, HEAD_DIM, size, ptrs, CODED)


def attend(
    blocks: DeviceBlocks,
    tables: torch.Tensor,
    layer: int,
    q: torch.Tensor,
    work: Work,
    out: torch.Tensor,
    partials: Partials,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    coded: CodedRows | None = None,
    sealed: SealedPlace | None = None,
) -> None:
    """Compute softmax(scale * q k^T) v over each sequence's tokens, up to each query's position.

    Args:
        tables: block ids of each sequence `[S, blocks]` int64, read on the device like `work`.
        q: queries of all spans `[C, H, D]` float32, from `append_rotated`; where the blocks have
            latents, with what these are multiplied by behind it.
        work: work of the programs, by `Tiling.plan` for these blocks and heads.
        out: results, `[C, H, D]` float32, or as wide as latents. Of sealed blocks, it has the
            queries before the Hadamard transform, from `append_rotated` as well.
        partials: buffers for `C` tokens or more.
        window: number of positions that a query sees, its own included; None: all positions.
        scale: factor of the scores; None is `D ** -0.5`.
        softcap: soft cap, if any: scores `s` become `softcap * tanh(s / softcap)`.
        sinks: for each head a score without key and value, `[H]` float32, if any.
        gate: numbers whose sigmoids results are multiplied by, `[C, H * D]` float32, or None.
        coded: where results are written as codes instead, if `takes_codes`.
        sealed: sealed blocks of the same layers, where the format seals them.
    """
    host, width = blocks.host, blocks.host.value_dim
    (tokens, heads), head_dim, padded = q.shape[:2], host.head_dim, max(16, aligned(width))
    keys = Tiling.of(blocks, heads).keys
    pool, ids, key_bits, value_bits = (
        (blocks.k, blocks.v, blocks.k_scale, blocks.v_scale),
        tables,
        0,
        8,
    )
    if sealed is not None:
        pool, ids, bits = sealed.arrays, sealed.tables, sealed.sealing
        key_bits, value_bits = bits.key_bits, bits.value_bits
        wide = work.tile * padded >= 4096
        if padded == 64 and not wide:
            keys = 32  # with 64 four warps spill 8 to 16 bytes on sm_90, and eight 8 on sm_80
    else:
        # of 512 numbers four warps hold codes, and spill 16 bytes of a thread in f16
        large = width > (64 if blocks.format == "f32" else 256)
        wide = work.tile == ROWS or (large and (host.latent > 0 or blocks.format != "int8"))
    attention_kernel[(len(work.jobs), host.kv_heads)](
        q,
        out,
        blocks.k,
        blocks.v,
        blocks.k_scale,
        blocks.v_scale,
        *pool,
        tables,
        ids,
        work.jobs,
        partials.sums,
        partials.largest,
        partials.weight,
        tables.stride(0),
        host.kv_heads,
        layer,
        host.layers,
        window or 1 << 30,
        head_dim**-0.5 if scale is None else scale,
        0.0 if softcap is None else softcap,
        GROUP=heads // host.kv_heads,
        HEAD_DIM=head_dim,
        LATENT=host.latent,
        FORMAT=blocks.row_format,
        KEY_BITS=key_bits,
        VALUE_BITS=value_bits,
        CAP=softcap is not None,
        KEY_WIDTH=max(16, aligned(head_dim)),
        WIDTH=padded,
        ROWS=work.tile,
        KEYS=keys,
        BLOCK=BLOCK,
        FIELDS=JOB_FIELDS,
        num_warps=8 if wide else 4,
        **early(),
    )
    combine_kernel[(tokens * heads,)](
        partials.sums,
        partials.largest,
        partials.weight,
        out if sinks is None else sinks,
        out if gate is None else gate,
        *row_pointers(out, coded),
        work.rows,
        heads,
        HEAD_DIM=width,
        WIDTH=aligned(width),
        HADAMARD=hadamard_size(blocks, SEALED, width),
        SINKS=sinks is not None,
        GATED=gate is not None,
        CODED=coded is not None,
        FIELDS=ROW_FIELDS,
        num_warps=4 if blocks.format in SEALED else 1,
        **early(),
    )


def takes_codes(head_dim: int) -> bool:
    """Whether heads are whole groups of codes."""
    return head_dim % GROUP == 0
