"""Gated delta net: a recurrence over the rows of a sequence in place of attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.linear import PackedWeights

__all__ = ["DeltaNetWeights", "DeltaRule"]


Floats = NDArray[np.float32]

# Columns of a head's matrix that lie side by side in a state.
STATE_COLUMNS = 32
MOST_TAPS = 8
LANES = 16  # of the widest vector


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Parameters of a gated delta net between its projections (Yang et al., arXiv:2412.06464).

    A state is `[taps - 1, channels]` inputs of the convolution, the oldest first, then the matrix
    of each value head, `[value_heads, value_dim / 32, key_dim, 32]`.

    Attributes:
        conv: weight of the convolution over q, k and v, `[taps, channels]`; the last tap is for a
            row itself.
        decay: rates of forgetting, below 0, `[value_heads]`.
        dt_bias: bias of the step sizes, `[value_heads]`.
        norm: weight of the norm of each head's output, `[value_dim]`.
        tiled: whether value head j has key head `j % key_heads`, as in GGUF files; else it has
            `j // (value_heads / key_heads)`.
    """

    conv: Floats
    decay: Floats
    dt_bias: Floats
    norm: Floats
    key_heads: int
    tiled: bool = False

    @property
    def value_heads(self) -> int:
        return len(self.decay)

    @property
    def value_dim(self) -> int:
        return len(self.norm)

    @property
    def size(self) -> int:
        """Width of v, of z and of the output."""
        return self.value_heads * self.value_dim

    @property
    def keys(self) -> int:
        """Width of q and of k."""
        return (self.channels - self.size) // 2

    @property
    def key_dim(self) -> int:
        return self.keys // self.key_heads

    @property
    def taps(self) -> int:
        return int(self.conv.shape[0])

    @property
    def channels(self) -> int:
        """Width of q, k and v together."""
        return int(self.conv.shape[1])

    @property
    def inputs(self) -> int:
        """Width of what the projections give: q, k and v, z, and two numbers of each value head."""
        return self.channels + self.size + 2 * self.value_heads

    @property
    def state_size(self) -> int:
        matrices = self.value_heads * self.key_dim * self.value_dim
        return (self.taps - 1) * self.channels + matrices

    def key_head_of(self, head: int) -> int:
        if self.tiled:
            return head % self.key_heads
        return head // (self.value_heads // self.key_heads)

    def check_heads(self) -> None:
        """Refuse heads that the kernels do not take.

        Raises:
            ValueError: a size does not fit; the message names it.
        """
        keys, values = self.key_heads, self.value_heads
        if self.channels != 2 * self.keys + self.size or self.keys % keys:
            raise ValueError(
                f"a convolution of {self.channels} channels; {values} value heads of "
                f"{self.value_dim} leave no {keys} key heads for q and k"
            )
        if values % keys:
            raise ValueError(f"{values} value heads are no multiple of {keys} key heads")
        if self.key_dim % LANES or self.value_dim % STATE_COLUMNS:
            raise ValueError(
                f"heads of {self.key_dim} and {self.value_dim} numbers; needed are multiples of "
                f"{LANES} and of {STATE_COLUMNS}"
            )
        if not 2 <= self.taps <= MOST_TAPS:
            raise ValueError(f"{self.taps} taps; needed are 2 to {MOST_TAPS}")


@dataclass(frozen=True, kw_only=True)
class DeltaNetWeights(DeltaRule):
    """Weights of a layer's gated delta net; see `StateMixer`.

    Attributes:
        qkv, z, a, b: projections to q, k and v, to the gate of the outputs, to step sizes and to
            learning rates.
    """

    qkv: PackedWeights
    z: PackedWeights
    a: PackedWeights
    b: PackedWeights

    @property
    def linears(self) -> tuple[PackedWeights, ...]:
        return self.qkv, self.z, self.a, self.b

    def check(self, hidden: int) -> None:
        self.check_heads()
        outputs = {"qkv": self.channels, "z": self.size, "a": self.value_heads}
        for name, needed in {**outputs, "b": self.value_heads}.items():
            linear: PackedWeights = getattr(self, name)
            if (linear.outputs, linear.inputs) != (needed, hidden):
                raise ValueError(
                    f"{name} is {(linear.outputs, linear.inputs)}; needed is {(needed, hidden)}"
                )
        vectors = {"decay": self.value_heads, "dt_bias": self.value_heads, "norm": self.value_dim}
        for name, array in (("conv", self.conv), *((n, getattr(self, n)) for n in vectors)):
            shape = (vectors[name],) if name in vectors else array.shape
            if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}; needed is float32 {shape}"
                )
