"""Fixed scales from what was seen in a calibration run.

A symmetric grid of 2^bits points has one number to choose: how far it reaches. Everything beyond is
clipped, and the further it reaches the coarser it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Method = Literal["minmax", "percentile", "mse"]
METHODS: tuple[str, ...] = get_args(Method)

# Sizes are counted by the upper 16 bits of a float32: 128 bins for each power of two.
_SHIFT = 16
_BINS = 1 << 15
# Reaches that `mse` tries, as shares of the largest size.
_SHARES = 0.8 ** np.arange(40)


@dataclass
class Observation:
    """The sizes of a tensor's values, over all rows that were seen.

    Attributes:
        largest: max|x| of each channel, `[K]`.
        counts: how many values had a size in each bin, `[2^15]`.
    """

    largest: NDArray[np.float32]
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    @classmethod
    def of(cls, channels: int) -> Observation:
        return cls(np.zeros(channels, np.float32))

    def add(self, rows: NDArray[np.float32]) -> None:
        """Count rows `[n, K]`.

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
    """How far the grid of a tensor should reach.

    Args:
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
    """The step of a symmetric grid of `bits` bits that reaches so far."""
    return reach / ((1 << bits - 1) - 1)


def error_share(seen: Observation, reach: float, *, bits: int, clips: bool = True) -> float:
    """What a grid loses, as a share of the energy of what was seen.

    Args:
        clips: whether it loses what is beyond it; else that is rounded to the same step.
    """
    if not seen.largest.any():
        return 0.0
    sizes = _sizes()
    energy = float((seen.counts * sizes**2).sum())
    return _squared_error(seen.counts, sizes, reach, bits, clips=clips) / energy


def _sizes() -> NDArray[np.float64]:
    """The middle of each bin."""
    low = (np.arange(_BINS, dtype=np.uint32) << _SHIFT) | (1 << _SHIFT - 1)
    middles = low.view(np.float32)
    return np.where(np.isfinite(middles), middles, 0.0).astype(
        np.float64
    )  # others are never counted


def _squared_error(
    counts: NDArray[np.int64],
    sizes: NDArray[np.float64],
    reach: float,
    bits: int,
    *,
    clips: bool = True,
) -> float:
    """Rounding costs step^2 / 12 a value on average, clipping the whole excess."""
    step = grid_scale(reach, bits=bits)
    excess = np.maximum(sizes - reach, 0.0) if clips else np.zeros_like(sizes)
    rounding = np.minimum(sizes**2, step**2 / 12)
    return float((counts * np.where(excess > 0, excess**2, rounding)).sum())
