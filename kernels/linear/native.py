"""A quantized linear layer in C++ (`cpu.h`)."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.linear.packed import PANEL, PackedWeights
from edgellm.kernels.native import address
from edgellm.kernels.quantized import KINDS


class LinearLayer(ctypes.Structure):
    """Weight of a linear layer for C++; the fields are those of call.h, in their order."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("fine", ctypes.c_int32),
    ]


class _Call(ctypes.Structure):
    """Arguments of one call of a linear layer; the fields are those of call.h, in their order."""

    _fields_ = [
        ("linear", LinearLayer),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


def layer_of(panels: PackedWeights | None, *, fine: bool = False) -> LinearLayer:
    """Return the structure that points at a weight, which must outlive the structure.

    Args:
        panels: the weight; None: there is none.
        fine: whether the layer takes activations of 16 bits, not 8.
    """
    if panels is None:
        return LinearLayer()
    kind = list(KINDS).index(panels.kind.name)
    return LinearLayer(address(panels.data), panels.outputs, panels.inputs, kind, fine)


def linear(
    library: ctypes.CDLL,
    x: NDArray[np.float32],
    panels: PackedWeights,
    *,
    fine: bool = False,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Compute y = x W^T for rows `[M, K]`: `[M, N]`.

    x is rounded to int8 with a scale for every 32 inputs, or to 16 bits if `fine`.
    """
    rows = floats(x, (len(x), panels.inputs), "x")
    out = np.empty((x.shape[0], -(-panels.outputs // PANEL) * PANEL), np.float32)
    layer = layer_of(panels, fine=fine)
    call = _Call(layer, address(rows), address(out), x.shape[0], threads)
    library.edgellm_linear(ctypes.byref(call))
    return out[:, : panels.outputs]
