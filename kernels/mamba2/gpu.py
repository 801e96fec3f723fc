"""Mamba-2 in Triton: a convolution, the states, and the gated norm of their outputs.

States take a span's rows one after the other, so that a row's bits are the same however a prompt is
cut. A program has `LANE_BLOCK` channels of a head, whose states stay in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgellm.kernels.gpu.device import aligned, on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.elementwise import softplus
from edgellm.kernels.gpu.kv_blocks import DeviceStateRows
from edgellm.kernels.linear.gpu_rows import CodedRows, row_pointers, store_part
from edgellm.kernels.mamba2.weights import LANE_BLOCK, Mamba2Vectors
from edgellm.kernels.quantized import GROUP
from edgellm.kernels.short_conv.gpu import Convolution

# Most outputs that a program norms at a time.
_WIDTH = 1024


@dataclass(frozen=True, kw_only=True)
class DeviceMamba2:
    """Vectors of a Mamba-2 in device memory; see `Mamba2Vectors`."""

    vectors: Mamba2Vectors
    convolution: Convolution
    decay: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor | None

    @classmethod
    def of(cls, vectors: Mamba2Vectors, device: str) -> DeviceMamba2:
        """Copy the vectors to the device."""
        conv, bias, norm = vectors.conv, vectors.conv_bias, vectors.norm
        return cls(
            vectors=vectors,
            convolution=Convolution(
                filters=on_device(conv, device),
                products=False,
                bias=None if bias is None else on_device(bias, device),
            ),
            decay=on_device(vectors.decay, device),
            dt_bias=on_device(vectors.dt_bias, device),
            skip=on_device(vectors.skip, device),
            norm=None if norm is None else on_device(norm, device),
        )

    @property
    def channels(self) -> int:
        return self.vectors.channels

    @property
    def takes_codes(self) -> bool:
        """Whether what is normed together are whole groups of codes."""
        return self.vectors.inner // self.vectors.groups % GROUP == 0

    def run(
        self,
        inputs: torch.Tensor,
        states: DeviceStateRows,
        layer: int,
        mixed: torch.Tensor,
        out: torch.Tensor,
        coded: CodedRows | None = None,
    ) -> None:
        """Compute the rows, and write their states.

        Args:
            inputs: rows `[C, inputs]` of z, x, B, C and dt.
            layer: place of the layer in the blocks.
            mixed: room for x, B and C behind the convolution, `[C, channels]`.
            out: results `[C, inner]` float32.
            coded: where results are written as codes instead, if `takes_codes`.
        """
        of, pool = self.vectors, states.pool.states
        self.convolution.run(inputs[:, of.inner :], states, layer, mixed)
        numbers = aligned(of.state_dim)
        scan_kernel[(len(states.spans), of.inner // LANE_BLOCK)](
            inputs,
            mixed,
            self.decay,
            self.dt_bias,
            self.skip,
            pool,
            states.spans,
            states.rows,
            inputs.stride(0),
            of.inner,
            of.channels,
            of.heads // of.groups,
            layer,
            pool.shape[1],
            pool.shape[2],
            (of.taps - 1) * of.channels,
            HEAD_DIM=of.head_dim,
            STATE_DIM=of.state_dim,
            NUMBERS=numbers,
            LANES=LANE_BLOCK,
            num_warps=max(1, numbers // 128),
            **early(),
        )
        width = of.inner // of.groups
        gated_norm_kernel[(len(states.rows), of.groups)](
            inputs,
            mixed,
            mixed if self.norm is None else self.norm,
            *row_pointers(out, coded),
            inputs.stride(0),
            of.inner,
            of.channels,
            width,
            of.epsilon,
            NORM=self.norm is not None,
            WIDTH=min(_WIDTH, max(GROUP, aligned(width))),
            CODED=coded is not None,
            num_warps=4,
            **early(),
        )


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def scan_kernel(
    in_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    state_ptr: tl.tensor,
    span_ptr: tl.tensor,
    row_ptr: tl.tensor,
    stride: tl.tensor,
    inner: tl.tensor,
    channels: tl.tensor,
    sharing: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    elements: tl.tensor,
    columns: tl.tensor,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
    LANES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Take LANES channels of a head through the rows of a span; outputs go where x was.

    The grid counts spans, then such channels. NUMBERS is STATE_DIM rounded up to a power of two,
    `sharing` the number of heads with the same B and C, `columns` the number of a state's elements
    before those of its heads.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    part = tl.program_id(1)
    head = part // (HEAD_DIM // LANES)
    span_ptr += tl.program_id(0) * 4
    first, rows = tl.load(span_ptr), tl.load(span_ptr + 1)
    source = tl.load(span_ptr + 2)
    i, c = tl.arange(0, NUMBERS), tl.arange(0, LANES)
    known = i < STATE_DIM
    before = i < tl.where(source < 0, 0, STATE_DIM)
    state_ptr += columns + part * (STATE_DIM * LANES)
    at = i[:, None] * LANES + c[None, :]
    from_ptr = state_ptr + (source.to(tl.int64) * layers + layer) * elements
    s = tl.load(from_ptr + at, mask=before[:, None], other=0.0)
    tl.debug_barrier()  # the block may be the first that is written
    decay, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    step_ptr = in_ptr + inner + channels + head
    b_ptr = mixed_ptr + inner + head // sharing * STATE_DIM + i
    c_ptr = b_ptr + (channels - inner) // 2
    x_ptr = mixed_ptr + part * LANES + c
    for row in range(first, first + rows):
        step = softplus(tl.load(step_ptr + row * stride) + bias)
        x = tl.load(x_ptr + row * channels)
        b = tl.load(b_ptr + row * channels, mask=known, other=0.0)
        s = s * tl.exp(decay * step) + b[:, None] * (step * x)[None, :]
        y = s * tl.load(c_ptr + row * channels, mask=known, other=0.0)[:, None]
        tl.store(x_ptr + row * channels, tl.sum(y, axis=0) + skip * x)
        target = tl.load(row_ptr + 2 * row + 1)
        if target >= 0:
            to_ptr = state_ptr + (target.to(tl.int64) * layers + layer) * elements
            tl.store(to_ptr + at, s, mask=known[:, None])


@triton.jit
def gated_norm_kernel(
    in_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    stride: tl.tensor,
    inner: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    CODED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Gate the outputs of a row's group, and normalize them if NORM; the grid counts rows first."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    row, start = tl.program_id(0), tl.program_id(1) * width
    y_ptr, z_ptr = mixed_ptr + row * channels + start, in_ptr + row * stride + start
    factor = 1.0
    if NORM:
        squares = tl.zeros([WIDTH], tl.float32)
        for done in range(0, width, WIDTH):
            x = gated(y_ptr, z_ptr, done + tl.arange(0, WIDTH), width)
            squares += x * x
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + epsilon)
    for done in range(0, width, WIDTH):
        k = done + tl.arange(0, WIDTH)
        x = gated(y_ptr, z_ptr, k, width)
        if NORM:
            x *= factor * tl.load(norm_ptr + start + k, mask=k < width, other=0.0)
        ptrs = out_ptr, codes_ptr, scale_ptr, shift_ptr
        store_part(x, row, start + done, width - done, inner, ptrs, CODED)


@triton.jit
def gated(y_ptr: tl.tensor, z_ptr: tl.tensor, k: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Return y * SiLU(z) at places `k`, and 0 from `width` on."""
    z = tl.load(z_ptr + k, mask=k < width, other=0.0)
    return tl.load(y_ptr + k, mask=k < width, other=0.0) * z / (1.0 + tl.exp(-z))
