"""Layout of quantized weights for the C++ and Triton kernels: panels of 16 outputs.

A weight `[N, K]` is cut into runs of 16 outputs, a run into groups of 32 inputs. One 64-byte
register holds four inputs (a quad) of all 16 outputs, and a product reads the weight from its first
byte to its last. A group of a panel lies in memory as

    4, 5, 6 bits   4 x 64 bytes: for quad i, output n: the low halves of the codes of inputs
                   4i .. 4i + 3 in the low nibbles, those of quad i + 4 in the high ones
    5 bits         64 bytes: bit i of a byte is bit 4 of the code of quad i
    6 bits         2 x 64 bytes: bits 2i and 2i + 1 of a byte of the first are bits 4 and 5 of the
                   code of quad i, of the second of quad i + 4
    8 bits         8 x 64 bytes: for quad i, output n: the codes of inputs 4i .. 4i + 3, less 128
    scale          16 halves, one per output; 16 bytes for each 16 or 32 inputs in blocked kinds
    offset         the same, affine kinds only

Before the 8 groups of a block, blocked kinds have the 16 halves of `block_scale` and, if they are
affine, of `block_offset`. N is padded to whole panels with zeros. The kinds are in `quantized.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import indices
from edgellm.kernels.quantized import (
    BLOCK,
    GROUP,
    Kind,
    QuantizedWeight,
    dequantize,
    row_slices,
)

PANEL = 16
_BLOCK_GROUPS = BLOCK // GROUP
Bytes = NDArray[Any]  # uint8


@dataclass(frozen=True)
class PackedWeights:
    """Weight `[outputs, inputs]` in panels.

    Attributes:
        data: `[panels, inputs/32, bytes]` uint8; `[panels, inputs/256, bytes]` in blocked kinds.

    Raises:
        ValueError: `data` has another shape than such a weight needs.
    """

    data: Bytes
    outputs: int
    inputs: int
    kind: Kind

    def __post_init__(self) -> None:
        if self.inputs % self.kind.inputs_multiple:
            raise ValueError(
                f"{self.inputs} inputs are not groups of {self.kind.inputs_multiple}, as "
                f"{self.kind.name} has them"
            )
        shape = packed_shape(self.outputs, self.inputs, self.kind)
        data = self.data
        if data.dtype != np.uint8 or data.shape != shape or not data.flags.c_contiguous:
            raise ValueError(
                f"panels of {self.outputs} x {self.inputs} {self.kind.name} are uint8 {shape} "
                f"without gaps, not {data.dtype} {data.shape}"
            )


def packed_shape(outputs: int, inputs: int, kind: Kind) -> tuple[int, int, int]:
    """Return the shape of `PackedWeights.data` for a weight `[outputs, inputs]`."""
    panels = -(-outputs // PANEL)
    if kind.blocked:
        return panels, inputs // BLOCK, kind.block_bytes + _BLOCK_GROUPS * kind.group_bytes
    return panels, inputs // GROUP, kind.group_bytes


def pack_weight(weight: QuantizedWeight) -> PackedWeights:
    """Pack a quantized weight into panels; codes and scales stay the same."""
    outputs, inputs = weight.shape
    data = np.empty(packed_shape(outputs, inputs, weight.kind), np.uint8)
    for rows in row_slices(outputs, inputs):
        data[rows.start // PANEL : -(-rows.stop // PANEL)] = _packed(weight.rows(rows))
    return PackedWeights(data, outputs, inputs, weight.kind)


def unpack_weight(panels: PackedWeights) -> QuantizedWeight:
    """Return the quantized weight that was packed into panels."""
    kind, groups = panels.kind, panels.inputs // GROUP
    data = panels.data
    block = data[:, :, : kind.block_bytes]
    each = data[:, :, kind.block_bytes :].reshape(len(data), groups, kind.group_bytes)
    codes = _unpacked_codes(each[:, :, : 64 * kind.bits], kind)
    rest = each[:, :, 64 * kind.bits :]
    scale_type, offset_type = (np.int8, np.uint8) if kind.blocked else (np.float16, np.float16)
    width = GROUP // kind.group * PANEL * np.dtype(scale_type).itemsize
    both = kind.blocked and kind.affine
    parts: list[NDArray[Any] | None] = [
        codes,
        _outputs_first(rest[:, :, :width], scale_type),
        _outputs_first(rest[:, :, width:], offset_type) if kind.affine else None,
        _outputs_first(block[:, :, :32], np.float16) if kind.blocked else None,
        _outputs_first(block[:, :, 32:], np.float16) if both else None,
    ]
    cut: list[Any] = [None if part is None else part[: panels.outputs] for part in parts]
    return QuantizedWeight(kind, *cut)


def first_rows(panels: PackedWeights, rows: int) -> PackedWeights:
    """Return the first rows of a packed weight, `rows` of them or a few more; nothing is copied."""
    count = -(-rows // PANEL)
    if count * PANEL >= panels.outputs:
        return panels
    return PackedWeights(panels.data[:count], count * PANEL, panels.inputs, panels.kind)


def rows_of(panels: PackedWeights, rows: Sequence[int]) -> NDArray[np.float32]:
    """Dequantize rows of a packed weight to float32, `[len(rows), inputs]`.

    Raises:
        ValueError: the weight has no such row.
    """
    index = indices(rows, panels.outputs, "row")
    data = panels.data[index // PANEL]
    each = PackedWeights(data, len(data) * PANEL, panels.inputs, panels.kind)
    lanes = np.arange(len(data)) * PANEL + index % PANEL
    return dequantize(unpack_weight(each).rows(lanes))


def _packed(weight: QuantizedWeight) -> Bytes:
    """Pack some rows of a weight into panels."""
    kind, groups = weight.kind, weight.shape[1] // GROUP
    parts = [_packed_codes(weight.codes, kind), _groups_first(weight.scale, groups)]
    if weight.offset is not None:
        parts.append(_groups_first(weight.offset, groups))
    each = np.concatenate(parts, axis=-1)
    if weight.block_scale is None:
        return each
    blocks = weight.shape[1] // BLOCK
    shared = [_groups_first(weight.block_scale, blocks)]
    if weight.block_offset is not None:
        shared.append(_groups_first(weight.block_offset, blocks))
    return np.concatenate([*shared, each.reshape(len(each), blocks, -1)], axis=-1)


def _packed_codes(codes: Bytes, kind: Kind) -> Bytes:
    """Pack codes `[N, K]` into bytes `[P, K/32, 64 * bits]`, bits of a code."""
    quads = _padded(codes).reshape(-1, PANEL, codes.shape[1] // GROUP, GROUP // 4, 4)
    quads = quads.transpose(0, 2, 3, 1, 4).reshape(len(quads), -1, GROUP // 4, 64)  # [P, G, 8, 64]
    if kind.bits == 8:
        return np.asarray(quads ^ np.uint8(128)).reshape(*quads.shape[:2], -1)
    parts = [quads[:, :, :4] & 15 | _left(quads[:, :, 4:] & 15, 4)]
    high = _right(quads, 4)
    if kind.bits == 5:
        parts.append(np.bitwise_or.reduce([_left(high[:, :, i : i + 1], i) for i in range(8)]))
    if kind.bits == 6:
        for first in (0, 4):
            fields = [_left(high[:, :, first + i : first + i + 1], 2 * i) for i in range(4)]
            parts.append(np.bitwise_or.reduce(fields))
    return np.concatenate(parts, axis=2).reshape(*quads.shape[:2], -1)


def _unpacked_codes(data: Bytes, kind: Kind) -> Bytes:
    """Unpack bytes `[P, K/32, 64 * bits]` to codes `[16 P, K]`."""
    lines = data.reshape(*data.shape[:2], kind.bits, 64)
    if kind.bits == 8:
        quads = lines ^ np.uint8(128)
    else:
        quads = np.concatenate([lines[:, :, :4] & 15, lines[:, :, :4] >> 4], axis=2)
    if kind.bits == 5:
        quads |= np.stack(
            [_left(_right(lines[:, :, 4], i) & np.uint8(1), 4) for i in range(8)], axis=2
        )
    if kind.bits == 6:
        fields = [
            _left(_right(lines[:, :, 4 + i // 4], 2 * (i % 4)) & np.uint8(3), 4) for i in range(8)
        ]
        quads |= np.stack(fields, axis=2)
    panels, groups = data.shape[:2]
    quads = quads.reshape(panels, groups, GROUP // 4, PANEL, 4).transpose(0, 3, 1, 2, 4)
    return quads.reshape(panels * PANEL, groups * GROUP)


def _left(codes: Bytes, places: int) -> Bytes:
    return np.left_shift(codes, places, dtype=np.uint8)


def _right(codes: Bytes, places: int) -> Bytes:
    return np.right_shift(codes, places, dtype=np.uint8)


def _groups_first(values: NDArray[Any], groups: int) -> Bytes:
    """Reorder values `[N, groups * s]` to bytes `[P, groups, s * 16 * itemsize]`."""
    full = _padded(values)
    parts = full.reshape(-1, PANEL, groups, values.shape[1] // groups).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(parts).view(np.uint8).reshape(len(parts), groups, -1)


def _outputs_first(data: Bytes, dtype: Any) -> NDArray[Any]:
    """Reorder bytes `[P, groups, s * 16 * itemsize]` to values `[16 P, groups * s]`."""
    panels, groups = data.shape[:2]
    parts: NDArray[Any] = np.ascontiguousarray(data).view(dtype)
    parts = parts.reshape(panels, groups, -1, PANEL)
    return parts.transpose(0, 3, 1, 2).reshape(panels * PANEL, -1)


def _padded(values: NDArray[Any]) -> NDArray[Any]:
    """Pad `[N, ...]` with rows of zeros up to a whole panel."""
    missing = -len(values) % PANEL
    if not missing:
        return values
    return np.concatenate([values, np.zeros((missing, values.shape[1]), values.dtype)])
