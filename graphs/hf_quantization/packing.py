"""Unpacking of codes of a few bits from words to numpy arrays of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.quantized import row_slices

Bytes = NDArray[np.uint8]


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
