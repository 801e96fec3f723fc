"""Short convolutions over rows of sequences in Triton, whose last inputs states keep.

A convolution reads its inputs before the first row of a span from the state in the span's source,
and another launch writes those after some rows to their blocks. So all rows are computed side by
side, and a row's bits do not depend on where a sequence is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import aligned, interpreted
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.kv_blocks import DeviceStateRows
from edgellm.kernels.linear.gpu_rows import CodedRows, row_pointers, store_part

# Channels of a program.
_CHANNELS = 256


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """Convolution of some channels, with inputs that lie side by side in a row.

    Attributes:
        filters: `[taps, channels]`; the last tap is that of the row itself.
        products: whether a row has B, C and x, its inputs are B * x, and outputs are multiplied by
            C; else SiLU is applied to them.
        bias: of the outputs before SiLU, `[channels]`, or None.
    """

    filters: torch.Tensor
    products: bool
    bias: torch.Tensor | None = None

    @property
    def takes_codes(self) -> bool:
        return True

    def run(
        self,
        inputs: torch.Tensor,
        states: DeviceStateRows,
        layer: int,
        out: torch.Tensor,
        coded: CodedRows | None = None,
    ) -> None:
        """Compute the rows, and keep the inputs of the last rows in the states.

        Args:
            inputs: rows `[C, width]` float32; the channels are the first of each.
            layer: place of the layer in the blocks; its state begins with those inputs.
            out: results `[C, channels]` float32.
            coded: where results are written as codes instead.
        """
        taps, channels = self.filters.shape
        width = aligned(channels) if interpreted() else min(_CHANNELS, aligned(channels))
        pool, parts = states.pool.states, triton.cdiv(channels, width)
        numbers = inputs.stride(0), channels, layer, pool.shape[1], pool.shape[2]
        conv_kernel[(len(states.rows), parts)](
            inputs,
            self.filters,
            self.filters if self.bias is None else self.bias,
            pool,
            states.spans,
            states.rows,
            *row_pointers(out, coded),
            *numbers,
            TAPS=taps,
            PRODUCTS=self.products,
            BIAS=self.bias is not None,
            CODED=coded is not None,
            WIDTH=width,
            num_warps=4,
            **early(),
        )
        columns_kernel[(len(states.spans), parts)](
            inputs,
            pool,
            states.spans,
            states.rows,
            *numbers,
            TAPS=taps,
            PADDED=aligned(taps - 1),
            PRODUCTS=self.products,
            WIDTH=width,
            num_warps=4,
            **early(),
        )


@triton.jit
def conv_inputs(
    row_ptr: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    channels: tl.tensor,
    PRODUCTS: tl.constexpr,
) -> tl.tensor:
    """Load inputs of the convolution, `at` elements behind the first row; 0 where not `there`."""
    x = tl.load(row_ptr + at, mask=there, other=0.0)
    if PRODUCTS:
        x *= tl.load(row_ptr + at + 2 * channels, mask=there, other=0.0)
    return x


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def conv_kernel(
    in_ptr: tl.tensor,
    filter_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    span_ptr: tl.tensor,
    row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    elements: tl.tensor,
    TAPS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BIAS: tl.constexpr,
    CODED: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Convolve WIDTH channels of a row; the grid counts rows, then channels."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    span_ptr += tl.load(row_ptr + 2 * row) * 4
    first, source = tl.load(span_ptr), tl.load(span_ptr + 2)
    state_ptr += (source.to(tl.int64) * layers + layer) * elements
    total = tl.zeros([WIDTH], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=there, other=0.0)
    for tap in tl.static_range(TAPS):
        at = row - (TAPS - 1) + tap
        new = channel < tl.where(at < first, 0, channels)
        x = conv_inputs(in_ptr, at * stride + channel, new, channels, PRODUCTS)
        if tap < TAPS - 1:
            kept = channel < tl.where((at < first) & (source >= 0), channels, 0)
            old = state_ptr + (at - first + TAPS - 1) * channels + channel
            x = tl.where(at < first, tl.load(old, mask=kept, other=0.0), x)
        total += x * tl.load(filter_ptr + tap * channels + channel, mask=there, other=0.0)
    if PRODUCTS:
        total *= tl.load(in_ptr + row * stride + channels + channel, mask=there, other=0.0)
    else:
        total = total / (1.0 + tl.exp(-total))
    done = tl.program_id(1) * WIDTH
    ptrs = out_ptr, codes_ptr, scale_ptr, shift_ptr
    store_part(total, row, done, channels - done, channels, ptrs, CODED)


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def columns_kernel(
    in_ptr: tl.tensor,
    state_ptr: tl.tensor,
    span_ptr: tl.tensor,
    row_ptr: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    elements: tl.tensor,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write the inputs of the last TAPS - 1 rows, the oldest first, to each block of a span.

    The grid counts spans, then channels. The source may be the first block that is written, and
    others may need it. So the first one is written last, and by programs that have read it.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    span_ptr += tl.program_id(0) * 4
    first, rows = tl.load(span_ptr), tl.load(span_ptr + 1)
    source = tl.load(span_ptr + 2)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    column = tl.arange(0, PADDED)[:, None]
    there = (channel < channels) & (column < TAPS - 1)
    row_ptr += 2 * first + 1
    old_ptr = state_ptr + (source.to(tl.int64) * layers + layer) * elements
    for back in range(rows):
        target = tl.load(row_ptr + 2 * (rows - 1 - back))
        if target >= 0:
            at = rows - back - (TAPS - 1) + column
            now = (first + at) * stride + channel
            x = conv_inputs(in_ptr, now, there & (at >= 0), channels, PRODUCTS)
            kept = there & (at < tl.where(source < 0, 0 - TAPS, 0))
            old = old_ptr + (at + TAPS - 1) * channels + channel
            x = tl.where(at < 0, tl.load(old, mask=kept, other=0.0), x)
            tl.debug_barrier()
            to_ptr = state_ptr + (target.to(tl.int64) * layers + layer) * elements
            tl.store(to_ptr + column * channels + channel, x, mask=there)
