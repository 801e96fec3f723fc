"""Mixers that keep a state of fixed size in place of K and V, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import LARGEST, check_sizes
from edgellm.kernels.delta_net import LANES, MOST_TAPS, STATE_COLUMNS
from edgellm.kernels.mamba2 import LANE_BLOCK


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """Gated short convolution of LFM2: `C * conv(B * x)`, each channel by itself.

    Attributes:
        channels: channels of B, C and x.
        taps: rows that a row's convolution sees, itself included.
    """

    channels: int
    taps: int

    def __post_init__(self) -> None:
        check_sizes(self, LARGEST)
        if self.taps < 2:
            raise ModelFormatError(f"model config: taps is {self.taps}; it must be 2 or more")

    @property
    def size(self) -> int:
        """Width of what the output projection reads."""
        return self.channels

    @property
    def inputs(self) -> int:
        """Width of what the input projection gives: B, C and x."""
        return 3 * self.channels

    @property
    def state_size(self) -> int:
        """Numbers of a state: `B * x` of the rows that the next one's convolution sees."""
        return (self.taps - 1) * self.channels


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2 (Dao and Gu, arXiv:2405.21060), with a gated norm before the output projection.

    Attributes:
        state_dim: numbers of the state that each channel of a head has.
        groups: number of B and C, each of which serves `heads / groups` heads and channels that the
            norm takes together.
        taps: rows that a row's convolution sees, itself included.
        norm_eps: number added to the mean squares of the norm.
        conv_bias: whether the convolution has a bias.
        gate_norm: whether the gated output is normalized.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    taps: int
    norm_eps: float
    conv_bias: bool = True
    gate_norm: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, LARGEST)
        if self.taps < 2:
            raise ModelFormatError(f"model config: taps is {self.taps}; it must be 2 or more")
        if self.heads % self.groups:
            raise ModelFormatError(
                f"model config: heads ({self.heads}) must be a multiple of groups ({self.groups})"
            )
        for name in ("head_dim", "state_dim"):
            if getattr(self, name) % LANE_BLOCK:
                raise UnsupportedModelError(
                    f"model config: {name} of Mamba-2 is {getattr(self, name)}; it must be a "
                    f"multiple of {LANE_BLOCK}"
                )

    @property
    def size(self) -> int:
        """Width of what the output projection reads: z, x and the output."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of x, B and C."""
        return self.size + 2 * self.groups * self.state_dim

    @property
    def inputs(self) -> int:
        """Width of the input projection: z, then x, B and C, then a step for each head."""
        return self.size + self.channels + self.heads

    @property
    def state_size(self) -> int:
        """Numbers of a state: x, B and C of the last rows, and the states of all channels."""
        return (self.taps - 1) * self.channels + self.size * self.state_dim


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta net (Yang et al., arXiv:2412.06464) behind a convolution of q, k and v.

    Attributes:
        taps: rows that a row's convolution sees, itself included.
        tiled: whether value head j has key head `j % key_heads`, as in GGUF files; else it has
            `j // (value_heads / key_heads)`.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, LARGEST)
        if self.value_heads % self.key_heads:
            raise ModelFormatError(
                f"model config: value_heads ({self.value_heads}) must be a multiple of "
                f"key_heads ({self.key_heads})"
            )
        if self.key_dim % LANES or self.value_dim % STATE_COLUMNS:
            raise UnsupportedModelError(
                f"model config: key_dim is {self.key_dim} and value_dim {self.value_dim}; needed "
                f"are multiples of {LANES} and of {STATE_COLUMNS}"
            )
        if not 2 <= self.taps <= MOST_TAPS:
            raise UnsupportedModelError(
                f"model config: taps is {self.taps}; 2 to {MOST_TAPS} are supported"
            )

    @property
    def size(self) -> int:
        """Width of what the output projection reads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.size

    @property
    def inputs(self) -> int:
        """Width of what the input projections give: q, k and v, z, then a and b of each head."""
        return self.channels + self.size + 2 * self.value_heads

    @property
    def state_size(self) -> int:
        """Numbers of a state: rows that the next one's convolution sees, and a matrix a head."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return (self.taps - 1) * self.channels + matrices


# What keeps a state of `state_size` in place of K and V.
StateMixer = ShortConv | Mamba2 | DeltaNet
