"""Weights of a Mamba-2 in the fused step (Dao and Gu, arXiv:2405.21060)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.linear import PackedWeights

# Channels of a head whose states lie side by side, so that all instruction sets read them in order.
LANE_BLOCK = 16

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Mamba2Vectors:
    """Vectors of the op between a layer's linear layers.

    A row that the op takes is `[z, x, B, C, dt]`. The convolution goes over x, B and C.

    Attributes:
        conv: weights of the convolution `[taps, channels]`; the last tap is for a row itself.
        conv_bias: bias of the convolution `[channels]`, or None.
        dt_bias: number added to dt before its softplus `[heads]`.
        decay: factor of dt in the exponent of a state's decay `[heads]`, below 0.
        skip: share of x in the output `[heads]`.
        norm: weight of the gated RMS norm `[heads * head_dim]`; None: the output is gated alone.
        groups: number of B and C; each serves `heads / groups` heads, and the norm takes the
            channels of these heads together.
        epsilon: number added to the mean squares of the norm.
    """

    conv: Floats
    dt_bias: Floats
    decay: Floats
    skip: Floats
    norm: Floats | None
    head_dim: int
    groups: int
    epsilon: float
    conv_bias: Floats | None = None

    @property
    def taps(self) -> int:
        return len(self.conv)

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of x, B and C."""
        return int(self.conv.shape[1])

    @property
    def heads(self) -> int:
        return len(self.decay)

    @property
    def inner(self) -> int:
        """Width of z, of x and of the output, `heads * head_dim`."""
        return self.heads * self.head_dim

    @property
    def state_dim(self) -> int:
        """Numbers of the state that a channel of x has: the width of one B."""
        return (self.channels - self.inner) // (2 * self.groups)

    @property
    def inputs(self) -> int:
        """Width of a row that the op takes."""
        return self.inner + self.channels + self.heads

    @property
    def state_size(self) -> int:
        """Numbers of the state of a layer."""
        return (self.taps - 1) * self.channels + self.inner * self.state_dim

    def check(self) -> None:
        """Refuse vectors that do not fit each other, or sizes that the C++ kernel does not take.

        Raises:
            ValueError: a vector or size does not fit.
        """
        for name in ("dt_bias", "decay", "skip"):
            floats(getattr(self, name), (self.heads,), name)
        if self.norm is not None:
            floats(self.norm, (self.inner,), "norm")
        floats(self.conv, (self.taps, self.channels), "conv")
        if self.conv_bias is not None:
            floats(self.conv_bias, (self.channels,), "conv_bias")
        states = 2 * self.groups * self.state_dim
        if self.heads % self.groups:
            raise ValueError(
                f"{self.heads} heads in {self.groups} groups do not share {self.inner} channels"
            )
        if self.head_dim % LANE_BLOCK or self.state_dim % LANE_BLOCK or not self.state_dim:
            raise ValueError(
                f"a head has {self.head_dim} channels of {self.state_dim} numbers; both must be "
                f"multiples of {LANE_BLOCK}"
            )
        if self.channels != self.inner + states or self.taps < 2:
            raise ValueError(f"a convolution of {self.taps} taps over {self.channels} channels")


@dataclass(frozen=True, kw_only=True)
class Mamba2Weights:
    """Weights of a layer's Mamba-2; see `StateMixer`.

    Attributes:
        mamba_in: projection to z, x, B, C and dt, `[inputs, E]`.
    """

    mamba_in: PackedWeights
    vectors: Mamba2Vectors

    @property
    def linears(self) -> tuple[PackedWeights, ...]:
        return (self.mamba_in,)

    @property
    def size(self) -> int:
        return self.vectors.inner

    @property
    def state_size(self) -> int:
        return self.vectors.state_size

    def check(self, hidden: int) -> None:
        self.vectors.check()
        shape, needed = (self.mamba_in.outputs, self.mamba_in.inputs), (self.vectors.inputs, hidden)
        if shape != needed:
            raise ValueError(f"mamba_in is {shape}; needed is {needed}")
