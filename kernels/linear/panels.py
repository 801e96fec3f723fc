"""The layout of quantized weights that the native kernels read: panels of 16 outputs.

A weight `[N, K]` is cut into runs of 16 outputs, a run into groups of 32 inputs. A group of a panel
lies in memory as

    int8    8 x 64 bytes: for quad i, output n: the signed codes of inputs 4i .. 4i + 3
    int4    4 x 64 bytes: the same for quads i (low nibbles) and i + 4 (high nibbles), codes 0 .. 15
    scale   16 halves, one an output
    offset  16 halves, one an output; affine int4 only

so that one 64-byte register holds four inputs of all 16 outputs, and a product reads the weight
from its first byte to its last. N is padded to whole panels with zeros. int4 stands for
`scale * code + offset`, where a symmetric weight has the offset `-8 * scale`; int8 for
`scale * code`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import indices
from edgellm.kernels.int4 import GROUP, Int4Weight, unpack

PANEL = 16
Kind = Literal["int4_symmetric", "int4_affine", "int8_symmetric"]
KINDS: tuple[Kind, ...] = ("int4_symmetric", "int4_affine", "int8_symmetric")
_GROUP_BYTES = (288, 320, 544)


@dataclass(frozen=True)
class Panels:
    """A weight `[outputs, inputs]`; `data` is `[panels, inputs/32, bytes]` uint8.

    Raises:
        ValueError: `data` is not the panels of such a weight.
    """

    data: NDArray[np.uint8]
    outputs: int
    inputs: int
    kind: Kind

    def __post_init__(self) -> None:
        shape = panels_shape(self.outputs, self.inputs, self.kind)
        data = self.data
        if data.dtype != np.uint8 or data.shape != shape or not data.flags.c_contiguous:
            raise ValueError(
                f"panels of {self.outputs} x {self.inputs} {self.kind} are uint8 {shape} without "
                f"gaps, not {data.dtype} {data.shape}"
            )
        if self.inputs % GROUP:
            raise ValueError(f"{self.inputs} inputs are not groups of {GROUP}")


def kind_of(data: NDArray[np.uint8]) -> Kind:
    """The kind of panels `[panels, groups, bytes]`: their groups have different sizes."""
    return KINDS[_GROUP_BYTES.index(data.shape[2])]


def panels_shape(outputs: int, inputs: int, kind: Kind) -> tuple[int, int, int]:
    """The shape of the panels of a weight `[outputs, inputs]`."""
    return -(-outputs // PANEL), inputs // GROUP, _GROUP_BYTES[KINDS.index(kind)]


def int4_panels(weight: Int4Weight) -> Panels:
    """Panels of an int4 weight whose scales and offsets are halves.

    Raises:
        ValueError: a scale or an offset is not a half.
    """
    outputs, inputs = weight.shape
    codes = _quads(unpack(weight.packed))  # [P, G, 8, 16, 4]
    nibbles = codes[:, :, :4] | np.left_shift(codes[:, :, 4:], 4, dtype=np.uint8)
    parts = [nibbles.reshape(*nibbles.shape[:2], -1), _halves(weight.scale)]
    symmetric = not weight.excess.any()
    if not symmetric:
        parts.append(_halves(weight.offset))
    kind: Kind = "int4_symmetric" if symmetric else "int4_affine"
    return Panels(_joined(parts), outputs, inputs, kind)


def int8_panels(codes: NDArray[np.int8], scale: NDArray[np.float32]) -> Panels:
    """Panels of symmetric int8 codes `[N, K]` and scales `[N, K/32]`, which must be halves.

    Raises:
        ValueError: a scale is not a half.
    """
    quads = _quads(codes.view(np.uint8))
    data = _joined([quads.reshape(*quads.shape[:2], -1), _halves(scale)])
    return Panels(data, codes.shape[0], codes.shape[1], "int8_symmetric")


def int8_rows(panels: Panels, rows: Sequence[int]) -> NDArray[np.float32]:
    """Rows of an int8 weight as float32, `[len(rows), inputs]`.

    Raises:
        ValueError: the weight has no such row.
    """
    index = indices(rows, panels.outputs, "row")
    panel, lane = index // PANEL, index % PANEL
    groups = panels.data[panel]  # [n, G, 544]
    codes = groups[..., :512].reshape(*groups.shape[:2], GROUP // 4, PANEL, 4).view(np.int8)
    scale = groups[..., 512:].copy().view(np.float16)
    each = np.arange(len(index))
    values = codes[each, :, :, lane].reshape(len(index), -1, GROUP).astype(np.float32)
    values *= scale[each, :, lane, None]
    return values.reshape(len(index), -1)


def _joined(parts: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """The parts of each group behind each other; numpy alone may choose another memory order."""
    return np.ascontiguousarray(np.concatenate(parts, axis=-1))


def _quads(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[N, K]` to `[P, K/32, 8, 16, 4]`."""
    rows, columns = codes.shape
    full = np.zeros((-(-rows // PANEL) * PANEL, columns), np.uint8)
    full[:rows] = codes
    quads = full.reshape(-1, PANEL, columns // GROUP, GROUP // 4, 4)
    return quads.transpose(0, 2, 3, 1, 4)


def _halves(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """`[N, K/32]` to the bytes `[P, K/32, 32]`."""
    rows, groups = values.shape
    full = np.zeros((-(-rows // PANEL) * PANEL, groups), np.float16)
    with np.errstate(over="ignore"):
        full[:rows] = values
    if not np.array_equal(full[:rows].astype(np.float32), values):
        raise ValueError("scales and offsets of panels are half-precision numbers")
    return np.ascontiguousarray(full.reshape(-1, PANEL, groups).transpose(0, 2, 1)).view(np.uint8)
