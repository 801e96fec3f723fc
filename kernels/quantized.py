"""Quantized weights as files hold them: codes, and the scales and offsets that give their values.

    w[n, k] = (code[n, k] - zero) * scale[n, k // group] + offset[n, k // 32]

A table kind has `table[code]` in place of `code - zero`. A blocked kind writes scales and offsets
as small integers times a half for each 256 inputs, as the K types of GGUF do (ggml-common.h):

    scale = scale_code * block_scale        offset = -offset_code * block_offset
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP = 32
BLOCK = 256

Half = np.float16
# Values of the codes of IQ4_NL and IQ4_XS, and twice the values of E2M1 floats.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class Kind:
    """Kind of quantized weights: the format of codes, scales and offsets.

    Attributes:
        bits: bits of a code.
        zero: code that stands for 0.
        affine: whether there are offsets.
        blocked: whether scales and offsets are integers times a half for every 256 inputs.
        group: number of inputs that share a scale, 16 or 32.
        table: values of the codes, 16 integers of 8 bits; None: the value is `code - zero`.
    """

    name: str
    bits: int
    zero: int = 0
    affine: bool = False
    blocked: bool = False
    group: int = GROUP
    table: tuple[int, ...] | None = None

    @property
    def group_bytes(self) -> int:
        """Bytes of 32 inputs of 16 packed outputs, without the part that a block's groups share."""
        each = 16 if self.blocked else 32
        return 64 * self.bits + each * (GROUP // self.group + self.affine)

    @property
    def block_bytes(self) -> int:
        """Bytes that the 8 groups of a panel's block share: halves, 16 scales and 16 offsets."""
        return (64 if self.affine else 32) if self.blocked else 0

    @property
    def inputs_multiple(self) -> int:
        return BLOCK if self.blocked else GROUP


# In the order of `Kind` in linear/call.h.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("int4_symmetric", 4, zero=8),
        Kind("int4_affine", 4, affine=True),
        Kind("int8_symmetric", 8, zero=128),
        Kind("int8_affine", 8, affine=True),
        Kind("int5_symmetric", 5, zero=16),
        Kind("int5_affine", 5, affine=True),
        Kind("int4_k", 4, affine=True, blocked=True),
        Kind("int5_k", 5, affine=True, blocked=True),
        Kind("int6_k", 6, zero=32, blocked=True, group=16),
        Kind("iq4_nl", 4, table=_IQ4),
        Kind("iq4_xs", 4, table=_IQ4, blocked=True),
        Kind("mxfp4", 4, table=_E2M1),
    )
}


@dataclass(frozen=True)
class QuantizedWeight:
    """Quantized weight `[N, K]` of a linear layer.

    Attributes:
        codes: `[N, K]` uint8.
        scale: `[N, K/group]` halves, or int8 in blocked kinds.
        offset: `[N, K/32]` halves, or uint8 in blocked kinds; None unless the kind is affine.
        block_scale: `[N, K/256]` halves in blocked kinds, else None.
        block_offset: `[N, K/256]` halves in blocked affine kinds, else None.

    Raises:
        ValueError: an array does not fit the kind.
    """

    kind: Kind
    codes: NDArray[np.uint8]
    scale: NDArray[Any]
    offset: NDArray[Any] | None = None
    block_scale: NDArray[np.float16] | None = None
    block_offset: NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        kind, (rows, columns) = self.kind, self.codes.shape
        if columns % kind.inputs_multiple:
            raise ValueError(f"{columns} inputs are not groups of {kind.inputs_multiple}")
        affine, both = kind.affine, kind.affine and kind.blocked
        self._require("codes", self.codes, np.uint8, (rows, columns))
        scale_type = np.int8 if kind.blocked else Half
        self._require("scale", self.scale, scale_type, (rows, columns // kind.group))
        offset_type = np.uint8 if kind.blocked else Half
        self._require("offset", self.offset, offset_type, (rows, columns // GROUP), affine)
        blocks = rows, columns // BLOCK
        self._require("block_scale", self.block_scale, Half, blocks, kind.blocked)
        self._require("block_offset", self.block_offset, Half, blocks, both)

    def _require(
        self,
        name: str,
        array: NDArray[Any] | None,
        dtype: Any,
        shape: object,
        there: bool = True,
    ) -> None:
        needed = f"{np.dtype(dtype)} {shape}" if there else None
        given = None if array is None else f"{array.dtype} {array.shape}"
        if given != needed:
            raise ValueError(f"{name} of {self.kind.name} is {given}; needed is {needed}")

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def scales(self) -> NDArray[np.float32]:
        """Return the scales `[N, K/group]` float32."""
        scale = self.scale.astype(np.float32)
        if self.block_scale is None:
            return scale
        return scale * np.repeat(self.block_scale.astype(np.float32), BLOCK // self.kind.group, 1)

    def offsets(self) -> NDArray[np.float32]:
        """Return the offsets `[N, K/32]` float32; zeros unless the kind is affine."""
        if self.offset is None:
            return np.zeros((self.shape[0], self.shape[1] // GROUP), np.float32)
        offset = self.offset.astype(np.float32)
        if self.block_offset is None:
            return offset
        return -offset * np.repeat(self.block_offset.astype(np.float32), BLOCK // GROUP, 1)

    def values(self) -> NDArray[np.int16]:
        """Return the values of the codes `[N, K]` before they are scaled: -255 .. 255."""
        if self.kind.table is not None:
            return np.array(self.kind.table, np.int16)[self.codes]
        return self.codes.astype(np.int16) - np.int16(self.kind.zero)

    def rows(self, index: slice | NDArray[np.intp]) -> QuantizedWeight:
        """Return the weight with some of its outputs, or with all of them in another order."""
        arrays: dict[str, Any] = {name: a[index] for name, a in self.arrays().items()}
        return replace(self, **arrays)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the weight's arrays by the names of their attributes, without absent ones."""
        names = ("codes", "scale", "offset", "block_scale", "block_offset")
        every = {name: getattr(self, name) for name in names}
        return {name: array for name, array in every.items() if array is not None}


def dequantize(weight: QuantizedWeight) -> NDArray[np.float32]:
    """Convert a quantized weight to float32, `[N, K]`."""
    values = np.empty(weight.shape, np.float32)
    for rows in row_slices(*weight.shape):
        values[rows] = _dequantized(weight.rows(rows))
    return values


def _dequantized(weight: QuantizedWeight) -> NDArray[np.float32]:
    rows, columns = weight.shape
    groups = weight.values().astype(np.float32).reshape(rows, -1, weight.kind.group)
    groups *= weight.scales()[..., None]
    values = groups.reshape(rows, -1, GROUP)
    if weight.offset is not None:
        values += weight.offsets()[..., None]
    return values.reshape(rows, columns)


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join weights of one kind and with the same inputs to a weight with the outputs of all.

    Raises:
        ValueError: the kinds differ.
    """
    first = weights[0]
    if any(weight.kind != first.kind for weight in weights):
        kinds = ", ".join(weight.kind.name for weight in weights)
        raise ValueError(f"weights of different kinds: {kinds}")
    every = [weight.arrays() for weight in weights]
    stacked: dict[str, Any] = {name: np.concatenate([a[name] for a in every]) for name in every[0]}
    return replace(first, **stacked)


def row_slices(rows: int, columns: int) -> Iterable[slice]:
    """Divide rows into slices of whole panels, with about a million numbers each.

    Python handles no interrupt within a call of numpy, and a whole embedding takes seconds.
    """
    step = max(16, (1 << 20) // max(columns, 1) // 16 * 16)
    return (slice(first, min(rows, first + step)) for first in range(0, rows, step))
