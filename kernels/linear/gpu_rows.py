"""Rows of activations as int8 codes for the integer products in `gpu_product.py`, in Triton.

32 numbers of a row share a scale, as in the C++ kernels. What the codes round off can be kept as a
second code, which makes 16 bits together. Eight rows lie together, in the order in which the
threads of a warp take them as an operand of `mma.m16n8k32`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import interpreted
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.quantized import GROUP

# Rows that one instruction multiplies.
TILE = 8


@dataclass(frozen=True)
class CodedRows:
    """Buffers for up to M rows `[M, K]` of codes; T is M / 8, rounded up.

    Attributes:
        codes, rest: `[T, K/32, 4, 8, 8]` int8: of 32 inputs and 8 rows, first for each quad of
            inputs and row, the codes of quad i and those of quad i + 4. `rest` is a 254th of
            `codes`.
        scale: values of a code, `[T, K/32, 8]` float32.
        shift: sums of the values of 32 codes, like `scale`.
        squares: sums of the squares of 32 numbers before the norm's weights, like `scale`.
    """

    codes: torch.Tensor
    rest: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def empty(cls, rows: int, inputs: int, device: str) -> CodedRows:
        tiles = 1 << (-(-rows // TILE) - 1).bit_length()  # as a product reads them
        size = tiles * TILE * inputs
        codes, rest = (torch.empty(size, dtype=torch.int8, device=device) for _ in range(2))
        floats = (torch.empty(size // GROUP, device=device) for _ in range(3))
        return cls(codes, rest, *floats)


@triton.jit
def nearest(x: tl.tensor) -> tl.tensor:
    """Round x to the nearest code, -127 to 127, halves to even, as an int32."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def store_rows(
    x: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    there: tl.tensor,
    groups: tl.tensor,
    codes_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    FINE: tl.constexpr,
) -> None:
    """Write groups of 32 numbers `[N, 32]` as codes.

    Args:
        row, group: of each group, `[N]`.
        there: mask of the groups to write.
        groups: number of groups in a row.
    """
    # a NaN or an infinity makes the scale NaN, so that it shows; `max` alone would drop a NaN
    scale = (tl.max(tl.abs(x), axis=1) + tl.sum(x * 0.0, axis=1)) * (1.0 / 127.0)
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    code = nearest(x / divisor)
    place = (row // 8 * groups + group) * 8 + row % 8
    k = tl.arange(0, 32)[None, :]
    # quads of all eight rows, then rows, then halves of the group, then inputs of a quad
    at = (place - row % 8)[:, None] * 32 + k % 16 // 4 * 64 + (row % 8)[:, None] * 8
    at += k // 16 * 4 + k % 4
    tl.store(codes_ptr + at, code.to(tl.int8), mask=there[:, None])
    total = tl.sum(code, axis=1).to(tl.float32)
    if FINE:
        rest = nearest((x - code.to(tl.float32) * scale[:, None]) * (254.0 / divisor))
        tl.store(rest_ptr + at, rest.to(tl.int8), mask=there[:, None])
        total += tl.sum(rest, axis=1).to(tl.float32) * (1.0 / 254.0)
    tl.store(scale_ptr + place, scale, mask=there)
    tl.store(shift_ptr + place, total * scale, mask=there)


@triton.jit
def store_part(
    x: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    ptrs: tl.tensor,
    CODED: tl.constexpr,
) -> None:
    """Write the first `count` of some numbers to a row of `size`, from its number `first` on.

    Args:
        ptrs: what `row_pointers` returns.
        CODED: whether they are written as codes, groups of 32 as a whole, or as floats.
    """
    out_ptr, codes_ptr, scale_ptr, shift_ptr = ptrs
    if CODED:
        number = tl.arange(0, x.numel // 32)
        store_rows(
            tl.reshape(x, [x.numel // 32, 32]),
            row + 0 * number,
            first // 32 + number,
            number < count // 32,
            size // 32,
            codes_ptr,
            codes_ptr,
            scale_ptr,
            shift_ptr,
            False,
        )
    else:
        i = tl.arange(0, x.numel)
        tl.store(out_ptr + row * size + first + i, x, mask=i < count)


def row_pointers(out: torch.Tensor, coded: CodedRows | None) -> list[torch.Tensor]:
    """Return where `store_part` writes; without codes kernels need pointers for them, too."""
    return [out] * 4 if coded is None else [out, coded.codes, coded.scale, coded.shift]


@triton.jit
def store_inputs(
    x: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    there: tl.tensor,
    groups: tl.tensor,
    norm_ptr: tl.tensor,
    ptrs: tl.tensor,
    NORM: tl.constexpr,
    FINE: tl.constexpr,
) -> None:
    """Write groups `[N, 32]` of a row, times the weights of an RMS norm if any, as codes.

    Args:
        ptrs: arrays of `CodedRows`.
    """
    codes_ptr, rest_ptr, scale_ptr, shift_ptr, squares_ptr = ptrs
    k = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    if NORM:
        place = (row // 8 * groups + group) * 8 + row % 8
        tl.store(squares_ptr + place, tl.sum(x * x, axis=1), mask=there)
        x *= tl.load(norm_ptr + k, mask=there[:, None], other=0.0)
    rows = tl.zeros(group.shape, tl.int32) + row
    store_rows(x, rows, group, there, groups, codes_ptr, rest_ptr, scale_ptr, shift_ptr, FINE)


@triton.jit
def code_rows_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    stride: tl.tensor,
    inputs: tl.tensor,
    NORM: tl.constexpr,
    FINE: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write GROUPS groups of a row, times the norm's weights if any; the grid counts rows first."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    groups = inputs // 32
    there = group < groups
    k = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64) * stride + k, mask=there[:, None], other=0.0)
    ptrs = codes_ptr, rest_ptr, scale_ptr, shift_ptr, squares_ptr
    store_inputs(x, row, group, there, groups, norm_ptr, ptrs, NORM, FINE)


def code_rows(
    x: torch.Tensor, rows: CodedRows, *, norm: torch.Tensor | None = None, fine: bool = False
) -> None:
    """Write rows `[M, K]` float32, parts of wider ones or not, as codes.

    Args:
        norm: weights `[K]` of an RMS norm, which they are multiplied by.
    """
    count, inputs = x.shape
    # a program of 32 groups has 8 numbers per thread
    each = triton.next_power_of_2(inputs // GROUP) if interpreted() else 32
    code_rows_kernel[(count, triton.cdiv(inputs // GROUP, each))](
        x,
        x if norm is None else norm,
        rows.codes,
        rows.rest,
        rows.scale,
        rows.shift,
        rows.squares,
        x.stride(0),
        inputs,
        NORM=norm is not None,
        FINE=fine,
        GROUPS=each,
        num_warps=4,
        **early(),
    )
