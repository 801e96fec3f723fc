"""Weights of the gated delta net between the projections of a layer, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Columns of a head's matrix that lie side by side in a state.
STATE_COLUMNS = 32
_MOST_TAPS = 8
_LANES = 16  # of the widest vector


@dataclass(frozen=True, kw_only=True)
class DeltaNetWeights:
    """Weights of a gated delta net (Yang et al., arXiv:2412.06464).

    A state is `[taps - 1, channels]` inputs of the convolution, the oldest first, then the matrix
    of each value head, `[value_heads, value_dim / 32, key_dim, 32]`.

    Attributes:
        conv: weight of the convolution over q, k and v, `[taps, channels]`; the last tap is for a
            row itself.
        decay: rates of forgetting, below 0, `[value_heads]`.
        dt_bias: bias of the step sizes, `[value_heads]`.
        norm: weight of the norm of each head's output, `[value_dim]`.
        epsilon: epsilon of that norm.
        tiled: whether value head j has key head `j % key_heads`, as in GGUF files; else it has
            `j // (value_heads / key_heads)`.
    """

    conv: Floats
    decay: Floats
    dt_bias: Floats
    norm: Floats
    epsilon: float
    key_heads: int
    tiled: bool = False

    @property
    def value_heads(self) -> int:
        return len(self.decay)

    @property
    def value_dim(self) -> int:
        return len(self.norm)

    @property
    def values(self) -> int:
        """Width of v, of z and of the output."""
        return self.value_heads * self.value_dim

    @property
    def keys(self) -> int:
        """Width of q and of k."""
        return (self.channels - self.values) // 2

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
    def state_size(self) -> int:
        matrices = self.value_heads * self.key_dim * self.value_dim
        return (self.taps - 1) * self.channels + matrices

    def key_head_of(self, head: int) -> int:
        """Return the key head of a value head."""
        if self.tiled:
            return head % self.key_heads
        return head // (self.value_heads // self.key_heads)

    def check(self) -> None:
        """Refuse weights that do not fit together.

        Raises:
            ValueError: a size is not what the kernels take; the message names it.
        """
        heads, dims = (self.key_heads, self.value_heads), (self.key_dim, self.value_dim)
        if self.channels != 2 * self.keys + self.values or self.keys % self.key_heads:
            raise ValueError(
                f"a convolution of {self.channels} channels; {self.value_heads} value heads of "
                f"{self.value_dim} leave no {self.key_heads} key heads for q and k"
            )
        if heads[1] % heads[0]:
            raise ValueError(f"{heads[1]} value heads are no multiple of {heads[0]} key heads")
        if dims[0] % _LANES or dims[1] % STATE_COLUMNS:
            raise ValueError(
                f"heads of {dims[0]} and {dims[1]} numbers; needed are multiples of {_LANES} and "
                f"of {STATE_COLUMNS}"
            )
        if not 2 <= self.taps <= _MOST_TAPS:
            raise ValueError(f"{self.taps} taps; needed are 2 to {_MOST_TAPS}")
        for name, size in (("decay", heads[1]), ("dt_bias", heads[1]), ("norm", dims[1])):
            array: Floats = getattr(self, name)
            if array.shape != (size,):
                raise ValueError(f"{name} is {array.shape}; needed is ({size},)")
        for name in ("conv", "decay", "dt_bias", "norm"):
            array = getattr(self, name)
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ValueError(f"{name} is {array.dtype}; needed is float32 without gaps")
