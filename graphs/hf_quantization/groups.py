"""Weights of integer codes whose inputs share scales in groups, as most formats have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.hf_quantization.packing import Bytes
from edgellm.graphs.tensor import Tensor
from edgellm.kernels.quantized import GROUP, KINDS, Kind, QuantizedWeight

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]

# Largest relative error of rounding to a half in its normal range.
_HALF_ERROR = 2.0**-11
_LARGEST_HALF = float(np.finfo(np.float16).max)
# Bits of a code -> the kind that holds it: with one zero for all codes, and with offsets.
_SYMMETRIC = {2: "int4_symmetric", 3: "int4_symmetric", 4: "int4_symmetric", 5: "int5_symmetric"}
_AFFINE = {2: "int4_affine", 3: "int4_affine", 4: "int4_affine", 5: "int5_affine"}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Weight `[N, K]` of integer codes, whose inputs form `G` groups.

        w[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g] + offsets[n, g]    g = group of k

    Attributes:
        shape: `(N, K)`.
        bits: bits of a code.
        groups: `G`.
        storage: name of the format, as in Tensor.
        codes: reads the codes `[N, K]`.
        scales: reads the scales `[N, G]`.
        zeros: reads the zeros `[N, G]`; None: all zeros are 0.
        offsets: reads the offsets `[N, G]`; None: no offsets.
        group_of: group of each input, `[K]`; None: groups are runs of `K / G` inputs.
    """

    shape: tuple[int, int]
    bits: int
    groups: int
    storage: str
    codes: Callable[[], Bytes]
    scales: Callable[[], Floats]
    zeros: Callable[[], Bytes] | None = None
    offsets: Callable[[], Floats] | None = None
    group_of: NDArray[np.intp] | None = None

    def tensor(self) -> Tensor:
        """Return the weight as a Tensor, with `quantized` where halves hold the scales.

        Codes are taken over as they are. Scales and offsets (`-zero * scale` where the file has
        zeros) are rounded to halves, with a relative error of 2^-11 at most. If the error is
        larger, or a run of 32 inputs lies in several groups, `quantized` is None. The choice reads
        scales and offsets; it reads codes only if halves do not hold a scale.
        """
        of_32 = self._groups_of_32()
        if of_32 is None or self._halves() is None:
            return Tensor(self.shape, self.storage, self._float32)
        return Tensor(self.shape, self.storage, self._float32, lambda: self._quantized(of_32))

    def _group_of(self) -> NDArray[np.intp]:
        if self.group_of is not None:
            return self.group_of
        return np.arange(self.shape[1]) // (self.shape[1] // self.groups)

    def _groups_of_32(self) -> NDArray[np.intp] | None:
        """Return the group of every run of 32 inputs; None if a run lies in several groups."""
        if self.shape[1] % GROUP:
            return None
        runs = self._group_of().reshape(-1, GROUP)
        return None if (runs != runs[:, :1]).any() else runs[:, 0]

    def _float32(self) -> Floats:
        rows, columns = self.shape
        values = self.codes().astype(np.float32, order="C")
        by_group = values if self.group_of is not None else values.reshape(rows, self.groups, -1)

        def spread(each: Bytes | Floats) -> Bytes | Floats:
            return each[..., None] if self.group_of is None else each[:, self.group_of]

        if self.zeros is not None:
            by_group -= spread(self.zeros())
        by_group *= spread(self.scales())
        if self.offsets is not None:
            by_group += spread(self.offsets())
        return values.reshape(rows, columns)

    def _halves(self) -> tuple[Halves, Halves | None] | None:
        """Return scales and offsets as halves; None if halves do not hold one of them."""
        scales = self.scales()
        offsets = None if self.offsets is None else self.offsets()
        half = half_scales(scales, self._unused)
        if half is None:
            return None
        if self.zeros is not None and np.abs(scales).max() * (1 << self.bits) > _LARGEST_HALF:
            return None
        if offsets is None:
            return half, None
        rounded = _rounded(offsets)
        largest = np.maximum(np.abs(offsets), np.abs(scales))
        # An offset far below a step may be lost: its error is measured against the step.
        if (np.abs(rounded.astype(np.float32) - offsets) > _HALF_ERROR * largest).any():
            return None
        return half, rounded

    def _unused(self) -> NDArray[np.bool_]:
        """Return a mask `[N, G]` of the groups whose values are all 0, whatever their scale is."""
        zeros = np.zeros((1, 1), np.uint8) if self.zeros is None else self.zeros()
        if self.group_of is None:
            by_group = self.codes().reshape(self.shape[0], self.groups, -1)
            return np.asarray((by_group == zeros[..., None]).all(axis=2))
        zeros = np.broadcast_to(zeros, (self.shape[0], self.groups))
        other = self.codes() != zeros[:, self.group_of]
        unused = np.ones((self.shape[0], self.groups), np.bool_)
        for group in range(self.groups):
            unused[:, group] = ~other[:, self.group_of == group].any(axis=1)
        return unused

    def _quantized(self, of_32: NDArray[np.intp]) -> QuantizedWeight:
        halves = self._halves()
        assert halves is not None
        scale, offset = halves
        codes = np.ascontiguousarray(self.codes())
        if self.zeros is not None:
            zeros = self.zeros()
            symmetric = _symmetric(self.bits, zeros)
            if symmetric is not None:
                kind, shift = symmetric
                shifted = codes + np.uint8(shift) if shift else codes
                return QuantizedWeight(kind, shifted, scale[:, of_32])
            offset = _rounded(-zeros.astype(np.float32) * scale)
        if offset is None:
            offset = np.zeros_like(scale)
        kind = KINDS[_AFFINE.get(self.bits, "int8_affine")]
        return QuantizedWeight(kind, codes, scale[:, of_32], offset[:, of_32])


def half_scales(scales: Floats, unused: Callable[[], NDArray[np.bool_]]) -> Halves | None:
    """Round scales to halves; None if halves do not hold one of them.

    Args:
        unused: returns a mask of the scales that scale zeros alone, and may have any value. Only
            called if halves do not hold a scale, because it reads the codes.
    """
    half = _rounded(scales)
    lost = ~(np.abs(half.astype(np.float32) - scales) <= _HALF_ERROR * np.abs(scales))
    if lost.any():
        if (lost & ~unused()).any():
            return None
        half[lost] = 0
    return half


def _rounded(values: Floats) -> Halves:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16)


def _symmetric(bits: int, zeros: Bytes) -> tuple[Kind, int] | None:
    """Return the kind without offsets that holds the codes, and the number to add to each code.

    None stands for codes with different zeros, or for codes that no such kind holds.
    """
    zero = int(zeros[0, 0])
    kind = KINDS[_SYMMETRIC.get(bits, "int8_symmetric")]
    shift = kind.zero - zero
    holds = shift >= 0 and (1 << bits) - 1 + shift < 1 << kind.bits
    return (kind, shift) if holds and (zeros == zero).all() else None
