"""Weights of integer codes whose inputs share scales in groups, and reads of their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.graphs.tensor import Tensor
from edgellm.kernels.quantized import GROUP, KINDS, Kind, QuantizedWeight, row_slices

Floats = NDArray[np.float32]
_EXPONENT_BIAS = 127
_EXPONENT_OF_NAN = 255
Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
# Largest relative error of rounding to a half in its normal range.
_HALF_ERROR = 2.0**-11
_LARGEST_HALF = float(np.finfo(np.float16).max)
# Bits of a code -> the kind that holds it: with one zero for all codes, and with offsets.
_SYMMETRIC = {2: "int4_symmetric", 3: "int4_symmetric", 4: "int4_symmetric", 5: "int5_symmetric"}
_AFFINE = {2: "int4_affine", 3: "int4_affine", 4: "int4_affine", 5: "int5_affine"}


def read_choice(fields: Fields, key: str, allowed: Sequence[int], *, origin: str) -> int:
    """Read an integer that must be one of `allowed`.

    Raises:
        UnsupportedModelError: the number is another one.
    """
    value = fields.read(int, key)
    if value not in allowed:
        raise UnsupportedModelError(
            f"{origin}: {key} is {value}; supported are {', '.join(map(str, allowed))}"
        )
    return value


def read_group_size(fields: Fields, *, origin: str) -> int:
    """Read the number of inputs that share a scale; -1 stands for all inputs.

    Raises:
        ModelFormatError: the number is neither -1 nor positive.
    """
    size = fields.read(int, "group_size")
    if size != -1 and size < 1:
        raise ModelFormatError(
            f"{origin}: group_size is {size}; it must be -1 (all inputs) or above 0"
        )
    return size


def group_count(columns: int, group_size: int, *, module: str, origin: str) -> int:
    """Return the number of groups of a module's inputs.

    Raises:
        ModelFormatError: the group size does not divide the number of inputs.
    """
    size = columns if group_size == -1 else group_size
    if columns % size:
        raise ModelFormatError(
            f"{origin}: group_size {group_size} does not divide the {columns} inputs of {module}"
        )
    return columns // size


def read_scales(folder: SafetensorsFolder, key: str) -> Floats:
    """Read a tensor of scales as float32.

    Raises:
        ModelFormatError: a scale is infinite or not a number.
    """
    values = folder.read(key).astype(np.float32)
    if not np.isfinite(values).all():
        raise _not_finite(folder, key)
    return values


def read_powers_of_two(folder: SafetensorsFolder, key: str) -> Floats:
    """Read a tensor of E8M0 scales, bytes `e` for `2^(e - 127)`, as float32.

    Raises:
        ModelFormatError: a scale is the byte for "not a number".
    """
    exponents = folder.read(key).view(np.uint8)
    if (exponents == _EXPONENT_OF_NAN).any():
        raise _not_finite(folder, key)
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _EXPONENT_BIAS)


def _not_finite(folder: SafetensorsFolder, key: str) -> ModelFormatError:
    return ModelFormatError(
        f"{folder.entry(key).file}: tensor {key} holds a scale that is infinite or not a number; "
        "the file is damaged, download it again"
    )


def unpack(words: NDArray[Any], bits: int) -> Bytes:
    """Unpack rows of words `[R, W]` of 8 or 32 bits to codes `[R, W * (8 or 32) / bits]`.

    The first code is in the lowest bits. A code that does not fit a word goes on in the next one.
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (data[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(data), -1)
    codes = np.empty((data.shape[0], data.shape[1] * 8 // bits), np.uint8)
    for part in row_slices(*codes.shape):
        single = np.unpackbits(data[part], axis=1, bitorder="little")
        groups = single.reshape(len(data[part]), -1, bits)
        codes[part] = np.packbits(groups, axis=2, bitorder="little")[..., 0]
    return codes


def unsigned(codes: NDArray[np.int8]) -> Bytes:
    """Convert codes -128 .. 127 to 0 .. 255, whose zero is 128."""
    return codes.view(np.uint8) ^ np.uint8(128)


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
