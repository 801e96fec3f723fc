"""The bit layout of int4 group-32 affine weights: `w = scale * code + offset`.

A row of `K` weights is cut into groups of 32. A group keeps 32 codes (0..15), one scale and one
offset. Two codes share a byte, the earlier one in the low nibble:

    group    | code 0 | code 1 | code 2 | code 3 |  ...  | code 30 | code 31 |
    byte     |      byte 0     |      byte 1     |  ...  |      byte 15      |
    nibble   |  low   |  high  |  low   |  high  |  ...  |   low   |  high   |

This is the order of ONNX Runtime's `MatMulNBits` (bits=4, block_size=32). Its implied zero point
is 8, so a kernel computes `(code - 8) * scale` and adds the rest of the affine form,
`(offset + 8 * scale) * sum(x over the group)`, on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP = 32
ZERO_POINT = 8


@dataclass(frozen=True)
class Int4Weight:
    """A linear layer's weight `[N, K]` as int4 groups.

    Attributes:
        packed: `[N, K/32, 16]` uint8, two codes a byte.
        scale: `[N, K/32]` float32.
        offset: `[N, K/32]` float32; exactly `-8 * scale` for a symmetric weight.
    """

    packed: NDArray[np.uint8]
    scale: NDArray[np.float32]
    offset: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, int]:
        rows, groups, _ = self.packed.shape
        return rows, groups * GROUP

    @property
    def excess(self) -> NDArray[np.float32]:
        """What the implied zero point leaves out, `offset + 8 * scale`: `[N, K/32]` float32."""
        return self.offset + np.float32(ZERO_POINT) * self.scale


def concatenate(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Weights of the same input on top of each other."""
    return Int4Weight(
        np.concatenate([weight.packed for weight in weights]),
        np.concatenate([weight.scale for weight in weights]),
        np.concatenate([weight.offset for weight in weights]),
    )


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes `[N, K]` (0..15) to bytes `[N, K/32, 16]`."""
    pairs = codes.reshape(codes.shape[0], -1, GROUP // 2, 2)
    return pairs[..., 0] | np.left_shift(pairs[..., 1], 4, dtype=np.uint8)


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes `[N, K/32, 16]` to codes `[N, K]`."""
    rows, groups, _ = packed.shape
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, groups * GROUP)


def dequantize(weight: Int4Weight) -> NDArray[np.float32]:
    """The float32 weight `[N, K]` that the codes stand for."""
    rows, columns = weight.shape
    codes = unpack(weight.packed).reshape(rows, -1, GROUP).astype(np.float32)
    values = codes * weight.scale[..., None] + weight.offset[..., None]
    return values.reshape(rows, columns)
