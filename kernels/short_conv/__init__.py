"""Gated short convolution: `C * conv(B * x)`, a filter of a few taps for each channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.linear import PackedWeights
from edgellm.kernels.quantized import GROUP

__all__ = ["ShortConvWeights"]


MOST_TAPS = 16


@dataclass(frozen=True, kw_only=True)
class ShortConvWeights:
    """Weights of a layer's short convolution; see `StateMixer`.

    Attributes:
        conv_in: projection to B, C and x, `[3 C, E]`.
        filters: `[taps, C]`; the last tap is that of the row itself.
    """

    conv_in: PackedWeights
    filters: NDArray[np.float32]

    @property
    def linears(self) -> tuple[PackedWeights, ...]:
        return (self.conv_in,)

    @property
    def size(self) -> int:
        return int(self.filters.shape[1])

    @property
    def state_size(self) -> int:
        """Numbers of a state `[taps - 1, C]`: `B * x` of the last rows, the oldest first."""
        return (len(self.filters) - 1) * self.size

    def check(self, hidden: int) -> None:
        filters = self.filters
        if filters.dtype != np.float32 or filters.ndim != 2 or not filters.flags.c_contiguous:
            raise ValueError(f"filters are {filters.dtype} {filters.shape}; needed are float32")
        taps, channels = filters.shape
        if not 2 <= taps <= MOST_TAPS or channels % GROUP:
            raise ValueError(
                f"filters of {taps} taps for {channels} channels; needed are 2 to {MOST_TAPS} taps "
                f"and channels in groups of {GROUP}"
            )
        shape = self.conv_in.outputs, self.conv_in.inputs
        if shape != (3 * channels, hidden):
            raise ValueError(f"conv_in is {shape}; needed is {(3 * channels, hidden)}")
