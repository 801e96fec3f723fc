"""Elementwise functions inside Triton kernels.

Each function is computed with one exponential, whose overflow yields the right limit.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@triton.jit
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Apply an `Activation` to x; None returns x itself.

    GELU (arXiv:1606.08415, section 2) is 0.5 x (1 + tanh u) = x / (1 + exp(-2 u)).
    """
    y = x
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu_tanh":
        # 2 sqrt(2 / pi) = 1.5957691
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if ACTIVATION == "clamped_swiglu":
        # `minimum` would drop a NaN
        y = tl.where(x > 7.0, 7.0, x)
        y /= 1.0 + tl.exp(-1.702 * y)
    return y


@triton.jit
def gate_factor(up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return what an activated gate is multiplied by, of a gated MLP's second product."""
    y = up
    if ACTIVATION == "clamped_swiglu":
        y = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return y


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(x)) with all digits of small results, as shares of nearly 1 need them."""
    power = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + power
    # the rounding of the sum is made up for
    log = tl.log(above) * (power / tl.maximum(above - 1.0, 1e-30))
    return tl.where(x > 20.0, x, tl.where(above == 1.0, power, log))


@triton.jit
def softened(score: tl.tensor, largest: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Take scores `[R, K]`, for exp2, into an online softmax: its weights, the factor by which what
    came before shrinks, and the largest score and sum of weights so far."""
    now = tl.maximum(largest, tl.max(score, axis=1))
    safe = tl.where(now == float("-inf"), 0.0, now)
    p = tl.exp2(score - safe[:, None])
    keep = tl.exp2(largest - safe)
    return p, keep, now, weight * keep + tl.sum(p, axis=1)


@triton.jit
def soft_capped(x: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return cap * tanh(x / cap), with an error of at most 1e-7 cap."""
    return cap - 2.0 * cap / (1.0 + tl.exp(2.0 * x / cap))
