"""Tiles of queries, keys and values in Triton, as they lie in blocks, for `gpu.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_tile(
    k_ptr: tl.tensor,
    first: tl.tensor,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Load KEYS keys from row `first` of a head's block on, `[WIDTH, KEYS]`; 0 past ROW elements.

    An element has one number, or one of each of 2 PARTS, which stand one behind the other, padded.
    """
    PANELS: tl.constexpr = KEYS // 16
    panel = first // 16 + tl.arange(0, PANELS)
    e = tl.arange(0, WIDTH * 16)
    within = e if PARTS == 1 else e % (WIDTH * 16 // PARTS)
    offset = panel[:, None] * (16 * ROW) + within[None, :]
    codes = tl.load(k_ptr + offset, mask=(within < 16 * ROW)[None, :], other=0)
    if PARTS == 2:
        shift = (e // (WIDTH * 8) * 4).to(tl.uint8)
        codes = (codes >> shift[None, :]) & 15
    codes = tl.reshape(codes, [PANELS, WIDTH // 4, 16, 4])
    return tl.reshape(tl.permute(codes, [1, 3, 0, 2]), [WIDTH, PANELS * 16])


@triton.jit
def value_tile(
    v_ptr: tl.tensor,
    first: tl.tensor,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Load KEYS values of ROW numbers from row `first` of a head's block on, `[KEYS, WIDTH]`.

    PARTS of a row stand one behind the other, padded. A byte has one number of each where BITS are
    given, else an element has one in all.
    """
    QUADS: tl.constexpr = KEYS // 4
    PART: tl.constexpr = ROW // PARTS
    STRIDE: tl.constexpr = PART if BITS > 0 else ROW
    quad = first // 4 + tl.arange(0, QUADS)
    e = tl.arange(0, WIDTH * 4)
    within = e if PARTS == 1 else e % (WIDTH * 4 // PARTS)
    part = e // (WIDTH * 4 // PARTS)
    at = within
    if BITS == 0 and PARTS > 1:
        at += part * (4 * PART)
    offset = quad[:, None] * (4 * STRIDE) + at[None, :]
    codes = tl.load(v_ptr + offset, mask=(within < 4 * PART)[None, :], other=0)
    if BITS > 0:
        codes = (codes >> (part * BITS).to(tl.uint8)[None, :]) & ((1 << BITS) - 1)
    codes = tl.reshape(codes, [QUADS, WIDTH, 4])
    return tl.reshape(tl.permute(codes, [0, 2, 1]), [QUADS * 4, WIDTH])


@triton.jit
def in_parts(WIDTH: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """Return the numbers of a row of SIZE that stand in WIDTH columns, and which are there."""
    c = tl.arange(0, WIDTH)
    number, inside = c, c < SIZE
    if PARTS > 1:
        within = c % (WIDTH // PARTS)
        number, inside = c // (WIDTH // PARTS) * (SIZE // PARTS) + within, within < SIZE // PARTS
    return number, inside


@triton.jit
def factors(codes: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Return what queries or weights are multiplied by."""
    return codes if FORMAT == "f32" else codes.to(tl.float16)


@triton.jit
def query_tile(
    q_ptr: tl.tensor, at: tl.tensor, inside: tl.tensor, FORMAT: tl.constexpr
) -> tl.tensor:
    """Load queries `[R, D]`, and what their scores are multiplied by."""
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    size = tl.max(tl.abs(q), axis=1)
    if FORMAT == "f32":
        size = tl.full(size.shape, 1.0, tl.float32)
    else:
        q = (q / tl.where(size > 0, size, 1.0)[:, None]).to(tl.float16)
    return q, size


@triton.jit
def products(q: tl.tensor, keys: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Return the products of queries and keys `[R, K]`, as `query_tile` and `factors` give them."""
    return tl.dot(q, keys, input_precision="ieee") if FORMAT == "f32" else tl.dot(q, keys)


@triton.jit
def with_values(
    sums: tl.tensor, keep: tl.tensor, p: tl.tensor, values: tl.tensor, v_scale: tl.tensor
) -> tl.tensor:
    """Return sums `[R, D]` that shrink by `keep`, and weights `p` times scaled values in halves."""
    size = tl.max(v_scale, axis=0)
    p *= (v_scale / tl.where(size > 0, size, 1.0))[None, :]
    return sums * keep[:, None] + tl.dot(p.to(tl.float16), values) * size
