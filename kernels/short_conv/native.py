"""The short convolution in C++ (`cpu.h`) on the rows of some sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.native import StatePointers, address
from edgellm.kernels.short_conv import ShortConvWeights
from edgellm.kernels.state_blocks import StateRows

Floats = NDArray[np.float32]


class ShortConvLayer(ctypes.Structure):
    """Short convolution of a layer; the fields are those of call.h, in their order."""

    _fields_ = [("in", LinearLayer), ("filters", ctypes.c_void_p), ("taps", ctypes.c_int32)]

    @classmethod
    def of(cls, weights: ShortConvWeights) -> ShortConvLayer:
        """Point at the weights, which must outlive the structure."""
        return cls(layer_of(weights.conv_in), address(weights.filters), len(weights.filters))


class _Call(ctypes.Structure):
    """Arguments of one call; the fields are those of call.h, in their order."""

    _fields_ = [
        ("conv", ShortConvLayer),
        ("spans", ctypes.POINTER(StatePointers)),
        *((name, ctypes.c_void_p) for name in ("rows", "out")),
        *((name, ctypes.c_int32) for name in ("span_count", "count", "threads")),
    ]


def short_conv(
    library: ctypes.CDLL,
    rows: Floats,
    weights: ShortConvWeights,
    spans: Sequence[StateRows],
    *,
    threads: int = 1,
) -> Floats:
    """Take rows `[C, 3 * size]`, of B, C and x, of some sequences through the op.

    Args:
        library: the compiled kernels.
        spans: rows of the sequences, one behind the other.

    Returns:
        Rows for the output projection `[C, size]`.

    Raises:
        ValueError: rows or states do not fit.
    """
    pointers = StatePointers.of(spans, size=weights.state_size)
    count = sum(span.rows for span in spans)
    rows = floats(rows, (count, 3 * weights.size), "rows")
    out = np.empty((count, weights.size), np.float32)
    layer = ShortConvLayer.of(weights)
    call = _Call(layer, pointers, address(rows), address(out), len(spans), count, threads)
    library.edgellm_short_conv(ctypes.byref(call))
    return out
