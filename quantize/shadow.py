"""Shadow outliers: what a fixed 8-bit grid clips, computed beside it (llm.npu, arXiv:2407.05858).

With r = round(x / s), a product with clipped activations and the rest of it are together what a
grid without end would give:

    x W^T  ~  s clip(r) W^T  +  s (r - clip(r)) W^T

The first product is the accelerator's. The second one has few columns that are not zero, and is the
host's. Nothing is lost to clipping, so such a grid can be narrower than others, and finer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Excess(NamedTuple):
    """What is beyond a grid: `values` `[rows, n]` of the inputs `columns` `[n]`."""

    columns: NDArray[np.intp]
    values: Floats


def excess_of(x: Floats, scale: float, *, bits: int = 8) -> Excess:
    """What a grid of step `scale` clips off rows `[rows, K]`, rounded to the same step."""
    half = 1 << bits - 1
    beyond = (x > (half - 1) * scale) | (x < -half * scale)
    columns = np.flatnonzero(beyond.any(axis=0))
    codes = np.rint(x[:, columns] / np.float32(scale))
    return Excess(columns, (codes - np.clip(codes, -half, half - 1)) * np.float32(scale))


@dataclass(frozen=True)
class ShadowLinear:
    """The host's side of a layer.

    Attributes:
        scale, bits: of the grid of its input.
        codes: int8 weight `[K, N]`, one input per row; mapped from a file, so that rows are in
            memory once they have been needed.
        weight_scale: `[N]`.
    """

    scale: float
    bits: int
    codes: NDArray[np.int8]
    weight_scale: Floats

    def correction(self, x: Floats) -> Floats | None:
        """What the layer's output `[rows, N]` lacks for input `[rows, K]`; None where nothing."""
        excess = excess_of(x, self.scale, bits=self.bits)
        if not len(excess.columns):
            return None
        return excess.values @ self.codes[excess.columns].astype(np.float32) * self.weight_scale
