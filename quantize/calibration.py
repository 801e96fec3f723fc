"""Static scales from the values of a calibration run.

A symmetric grid of 2^bits points has one number to choose, its reach. Values beyond the reach are
clipped, and a larger reach makes the grid coarser.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

Method = Literal["minmax", "percentile", "mse"]
METHODS: tuple[str, ...] = get_args(Method)

# Sizes are counted by the upper 16 bits of a float32, in 128 bins for each power of two.
_SHIFT = 16
_BINS = 1 << 15
# Reaches that the method `mse` tries, as shares of the largest size.
_SHARES = 0.8 ** np.arange(40)


@dataclass
class Observation:
    """Sizes of a tensor's values over all rows of a calibration run.

    Attributes:
        largest: max|x| of each channel, `[K]`.
        counts: number of values with a size in each bin, `[2^15]`.
    """

    largest: NDArray[np.float32]
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    @classmethod
    def of(cls, channels: int) -> Observation:
        return cls(np.zeros(channels, np.float32))

    def add(self, rows: NDArray[np.float32]) -> None:
        """Count the values of rows `[n, K]`.

        Raises:
            FloatingPointError: a value is infinite or not a number.
        """
        sizes = np.abs(rows)
        if not np.isfinite(sizes).all():
            raise FloatingPointError("a value that is infinite or not a number")
        np.maximum(self.largest, sizes.max(axis=0, initial=0.0), out=self.largest)
        bins = (sizes.view(np.uint32) >> _SHIFT).reshape(-1)
        self.counts += np.bincount(bins, minlength=_BINS)


def reach(
    seen: Observation, *, bits: int, method: Method, percentile: float = 99.9, headroom: float = 1.0
) -> float:
    """Choose the reach of a tensor's grid.

    Args:
        bits: bits of a code of the grid.
        method: `minmax` takes the largest size times `headroom`; `percentile` the size that
            `percentile` % of the values do not exceed; `mse` the reach with the least squared
            error of rounding and clipping.
    """
    largest = float(seen.largest.max(initial=0.0))
    if largest == 0.0:
        return 1.0  # any grid holds zeros
    if method == "minmax":
        return largest * headroom
    sizes = _sizes()
    if method == "percentile":
        share = np.cumsum(seen.counts) / seen.counts.sum()
        return min(largest, float(sizes[np.searchsorted(share, percentile / 100)]))
    errors = [_squared_error(seen.counts, sizes, largest * s, bits) for s in _SHARES]
    return largest * float(_SHARES[int(np.argmin(errors))])


def grid_scale(reach: float, *, bits: int) -> float:
    """Return the step of a symmetric grid with codes of `bits` bits and this reach."""
    return reach / ((1 << bits - 1) - 1)


def error_share(seen: Observation, reach: float, *, bits: int, clips: bool = True) -> float:
    """Return the squared error of a grid, as a share of the energy of the tensor's values.

    Args:
        clips: whether values beyond the grid are clipped; else they are rounded to its step.
    """
    if not seen.largest.any():
        return 0.0
    sizes = _sizes()
    energy = float((seen.counts * sizes**2).sum())
    return _squared_error(seen.counts, sizes, reach, bits, clips=clips) / energy


def _sizes() -> NDArray[np.float64]:
    """Return the middle of each bin."""
    low = (np.arange(_BINS, dtype=np.uint32) << _SHIFT) | (1 << _SHIFT - 1)
    middles = low.view(np.float32)
    return np.where(np.isfinite(middles), middles, 0.0).astype(
        np.float64
    )  # bins of infinity and NaN stay empty


def _squared_error(
    counts: NDArray[np.int64],
    sizes: NDArray[np.float64],
    reach: float,
    bits: int,
    *,
    clips: bool = True,
) -> float:
    """Sum the squared errors of a grid over all counted values.

    Rounding costs step^2 / 12 per value on average, and clipping costs the whole excess squared.
    """
    step = grid_scale(reach, bits=bits)
    excess = np.maximum(sizes - reach, 0.0) if clips else np.zeros_like(sizes)
    rounding = np.minimum(sizes**2, step**2 / 12)
    return float((counts * np.where(excess > 0, excess**2, rounding)).sum())


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
    """Host part of a linear layer with shadow outliers: values that a fixed 8-bit grid clips.

    The method is that of llm.npu (arXiv:2407.05858). With r = round(x / s), the product of clipped
    activations and the product of the clipped rest add up to the result of an unlimited grid:

        x W^T  ~  s clip(r) W^T  +  s (r - clip(r)) W^T

    The accelerator computes the first product. The second one has few columns that are not zero,
    and the host computes it. Clipping loses nothing, so such a grid can be narrower and finer than
    others.

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
