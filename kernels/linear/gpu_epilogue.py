"""What becomes of sums before they are stored, in Triton, for one row and for some."""

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
    """cap(activation(y + bias) * (up + up_bias)), of all that only what the constants name.

    Args:
        output: which of `outputs` they are, of a shape that broadcasts to that of y.
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
