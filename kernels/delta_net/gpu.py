"""The gated delta net in Triton: a convolution, the recurrence, and the norms of its outputs.

The recurrence is computed row after row, so that its bits are the same however a prompt is cut. A
program takes 32 columns of a head's matrix through all rows of a span, in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgellm.kernels.delta_net import STATE_COLUMNS, DeltaNetWeights, DeltaRule
from edgellm.kernels.gpu.device import aligned, on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.elementwise import softplus
from edgellm.kernels.gpu.kv_blocks import DeviceStateRows
from edgellm.kernels.linear.gpu_rows import CodedRows, row_pointers, store_part
from edgellm.kernels.short_conv.gpu import Convolution


@dataclass(frozen=True, kw_only=True)
class DeviceDeltaNet:
    """Parameters of a gated delta net in device memory; see `DeltaRule`.

    Attributes:
        epsilon: epsilon of the norms of the outputs.
    """

    rule: DeltaRule
    epsilon: float
    convolution: Convolution
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def of(cls, weights: DeltaNetWeights, epsilon: float, device: str) -> DeviceDeltaNet:
        """Copy the parameters to the device."""
        decay, dt_bias, norm = (
            on_device(each, device) for each in (weights.decay, weights.dt_bias, weights.norm)
        )
        convolution = Convolution(filters=on_device(weights.conv, device), products=False)
        return cls(
            rule=weights,
            epsilon=epsilon,
            convolution=convolution,
            decay=decay,
            dt_bias=dt_bias,
            norm=norm,
        )

    @property
    def channels(self) -> int:
        return self.rule.channels

    @property
    def takes_codes(self) -> bool:
        return True

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
            inputs: rows `[C, inputs]` of q, k and v, then z, a and b.
            layer: place of the layer in the blocks.
            mixed: room for q, k and v behind the convolution, `[C, channels]`.
            out: results `[C, size]` float32.
            coded: where results are written as codes instead.
        """
        rule, pool = self.rule, states.pool.states
        heads, width = rule.value_heads, rule.value_dim
        self.convolution.run(inputs, states, layer, mixed)
        recurrence_kernel[(len(states.spans), heads, width // STATE_COLUMNS)](
            inputs,
            mixed,
            self.decay,
            self.dt_bias,
            pool,
            states.spans,
            states.rows,
            inputs.stride(0),
            rule.channels,
            rule.key_heads,
            heads,
            layer,
            pool.shape[1],
            pool.shape[2],
            (rule.taps - 1) * rule.channels,
            KEY_DIM=rule.key_dim,
            VALUE_DIM=width,
            KEYS=aligned(rule.key_dim),
            TILED=rule.tiled,
            num_warps=8,  # with four, a thread of sm_86 spills 8 bytes
            **early(),
        )
        finish_kernel[(len(states.rows), heads)](
            inputs,
            mixed,
            self.norm,
            *row_pointers(out, coded),
            inputs.stride(0),
            rule.channels,
            heads,
            self.epsilon,
            VALUE_DIM=width,
            WIDTH=aligned(width),
            CODED=coded is not None,
            num_warps=1,
            **early(),
        )


@triton.jit
def unit(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return x / |x| * scale."""
    return x * (scale / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6))


# one compilation for all layers
@triton.jit(do_not_specialize=["layer"])
def recurrence_kernel(
    in_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    span_ptr: tl.tensor,
    row_ptr: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    key_heads: tl.tensor,
    heads: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    elements: tl.tensor,
    columns: tl.tensor,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    TILED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Take 32 columns of a head's matrix through the rows of a span; outputs go where v was.

    The grid counts spans, value heads and columns. KEYS is KEY_DIM rounded up to a power of two,
    `columns` the number of a state's elements before its matrices.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    head, part = tl.program_id(1), tl.program_id(2)
    span_ptr += tl.program_id(0) * 4
    first, rows = tl.load(span_ptr), tl.load(span_ptr + 1)
    source = tl.load(span_ptr + 2)
    key_head = head % key_heads if TILED else head // (heads // key_heads)
    i, c = tl.arange(0, KEYS), tl.arange(0, 32)
    known = i < KEY_DIM
    before = i < tl.where(source < 0, 0, KEY_DIM)
    state_ptr += columns + (head * (VALUE_DIM // 32) + part) * (KEY_DIM * 32)
    at = i[:, None] * 32 + c[None, :]
    from_ptr = state_ptr + (source.to(tl.int64) * layers + layer) * elements
    s = tl.load(from_ptr + at, mask=before[:, None], other=0.0)
    tl.debug_barrier()  # the block may be the first that is written
    decay, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)
    step_ptr = in_ptr + channels + heads * VALUE_DIM + head
    key_ptr = mixed_ptr + key_head * KEY_DIM
    value_ptr = mixed_ptr + 2 * key_heads * KEY_DIM + head * VALUE_DIM + part * 32
    for row in range(first, first + rows):
        q = tl.load(key_ptr + row * channels + i, mask=known, other=0.0)
        k = tl.load(key_ptr + row * channels + key_heads * KEY_DIM + i, mask=known, other=0.0)
        q, k = unit(q, KEY_DIM**-0.5), unit(k, 1.0)
        kept = tl.exp(decay * softplus(tl.load(step_ptr + row * stride) + bias))
        learned = 1.0 / (1.0 + tl.exp(-tl.load(step_ptr + row * stride + heads)))
        s *= kept
        value = tl.load(value_ptr + row * channels + c)
        change = learned * (value - tl.sum(s * k[:, None], axis=0))
        s += k[:, None] * change[None, :]
        tl.store(value_ptr + row * channels + c, tl.sum(s * q[:, None], axis=0))
        target = tl.load(row_ptr + 2 * row + 1)
        if target >= 0:
            to_ptr = state_ptr + (target.to(tl.int64) * layers + layer) * elements
            tl.store(to_ptr + at, s, mask=known[:, None])


@triton.jit
def finish_kernel(
    in_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    heads: tl.tensor,
    epsilon: tl.tensor,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CODED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalize and gate the outputs of a row and head; the grid counts rows, then heads."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    known = d < VALUE_DIM
    size = heads * VALUE_DIM
    x = tl.load(
        mixed_ptr + (row + 1) * channels - size + head * VALUE_DIM + d, mask=known, other=0.0
    )
    gate = tl.load(in_ptr + row * stride + channels + head * VALUE_DIM + d, mask=known, other=0.0)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / VALUE_DIM + epsilon)
    x *= tl.load(norm_ptr + d, mask=known, other=0.0) * (gate / (1.0 + tl.exp(-gate)))
    ptrs = out_ptr, codes_ptr, scale_ptr, shift_ptr
    store_part(x, row, head * VALUE_DIM, VALUE_DIM, size, ptrs, CODED)
