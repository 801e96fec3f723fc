"""Shadow outliers: the host computes the values that a fixed 8-bit grid clips.

The method is that of llm.npu (arXiv:2407.05858). With r = round(x / s), the product of clipped
activations and the product of the clipped rest add up to the result of an unlimited grid:

    x W^T  ~  s clip(r) W^T  +  s (r - clip(r)) W^T

The accelerator computes the first product. The second one has few columns that are not zero, and
the host computes it. Clipping loses nothing, so such a grid can be narrower and finer than others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Excess(NamedTuple):
    """Values beyond a grid.

    Attributes:
        columns: indices of the inputs with such values, `[n]`.
        values: excess of these inputs, `[rows, n]`; 0 where a row is within the grid.
    """

    columns: NDArray[np.intp]
    values: Floats


def excess_of(x: Floats, scale: float, *, bits: int = 8) -> Excess:
    """Return the part of rows `[rows, K]` that a grid of step `scale` clips, rounded to steps."""
    half = 1 << bits - 1
    beyond = (x > (half - 1) * scale) | (x < -half * scale)
    columns = np.flatnonzero(beyond.any(axis=0))
    codes = np.rint(x[:, columns] / np.float32(scale))
    return Excess(columns, (codes - np.clip(codes, -half, half - 1)) * np.float32(scale))


@dataclass(frozen=True)
class ShadowLinear:
    """Host part of a linear layer with shadow outliers.

    Attributes:
        scale, bits: step, and bits of a code, of the grid of the layer's input.
        codes: int8 weight `[K, N]`, one input per row; mapped from a file, so that memory holds
            only rows that were needed before.
        weight_scale: scale of each output, `[N]`.
    """

    scale: float
    bits: int
    codes: NDArray[np.int8]
    weight_scale: Floats

    def correction(self, x: Floats) -> Floats | None:
        """Return the product of clipped values, which the layer's output `[rows, N]` lacks.

        None stands for input `[rows, K]` without clipped values.
        """
        excess = excess_of(x, self.scale, bits=self.bits)
        if not len(excess.columns):
            return None
        return excess.values @ self.codes[excess.columns].astype(np.float32) * self.weight_scale
