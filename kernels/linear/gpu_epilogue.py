"""Epilogue of linear layers in Triton: bias, activation, gate and soft cap before the store."""

from __future__ import annotations

import triton
import triton.language as tl

from edgellm.kernels.gpu.elementwise import activated, soft_capped


@triton.jit
def epilogue(
    y: tl.tensor,
    up: tl.tensor,
    bias_ptr: tl.tensor,
    up_bias_ptr: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    cap: tl.tensor,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    UP_BIAS: tl.constexpr,
    CAP: tl.constexpr,
) -> tl.tensor:
    """Compute cap(activation(y + bias) * (up + up_bias)), with the parts that the constants name.

    Args:
        output: indices of the outputs y, of a shape that broadcasts to that of y.
        outputs: number of outputs of the layer.
    """
    if BIAS:
        y += tl.load(bias_ptr + output, mask=output < outputs, other=0.0)
    y = activated(y, ACTIVATION)
    if GATED:
        if UP_BIAS:
            up += tl.load(up_bias_ptr + output, mask=output < outputs, other=0.0)
        y *= up
    if CAP:
        y = soft_capped(y, cap)
    return y
