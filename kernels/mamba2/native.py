"""Mamba-2 in C++ (`cpu.h`) on the rows of some sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.mamba2.weights import LANE_BLOCK, Mamba2Vectors, Mamba2Weights
from edgellm.kernels.native import StatePointers, address
from edgellm.kernels.state_blocks import StateRows

Floats = NDArray[np.float32]


class Mamba2Layer(ctypes.Structure):
    """Mamba-2 of a layer; the fields are those of call.h, in their order."""

    _fields_ = [
        ("in", LinearLayer),
        *((name, ctypes.c_void_p) for name in ("conv", "conv_bias", "dt_bias", "decay", "skip")),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("heads", "head_dim", "state_dim", "groups", "taps")),
        ("epsilon", ctypes.c_float),
    ]

    @classmethod
    def of(cls, weights: Mamba2Weights) -> Mamba2Layer:
        """Point at the weights, which must outlive the structure."""
        return _layer(layer_of(weights.mamba_in), weights.vectors)


def _layer(linear: LinearLayer, vectors: Mamba2Vectors) -> Mamba2Layer:
    return Mamba2Layer(
        linear,
        address(vectors.conv),
        address(vectors.conv_bias),
        address(vectors.dt_bias),
        address(vectors.decay),
        address(vectors.skip),
        address(vectors.norm),
        vectors.heads,
        vectors.head_dim,
        vectors.state_dim,
        vectors.groups,
        vectors.taps,
        vectors.epsilon,
    )


class _Call(ctypes.Structure):
    """Arguments of one call of Mamba-2; the fields are those of call.h, in their order."""

    _fields_ = [
        ("layer", Mamba2Layer),
        ("spans", ctypes.POINTER(StatePointers)),
        *((name, ctypes.c_void_p) for name in ("rows", "mixed", "out")),
        *((name, ctypes.c_int32) for name in ("span_count", "count", "threads")),
    ]


def mamba2(
    library: ctypes.CDLL,
    rows: Floats,
    vectors: Mamba2Vectors,
    spans: Sequence[StateRows],
    *,
    threads: int = 1,
) -> Floats:
    """Take rows `[C, inputs]` of some sequences, one after the other, through the op.

    Returns:
        Rows for the output projection `[C, inner]`.

    Raises:
        ValueError: vectors, rows or states do not fit.
    """
    vectors.check()
    pointers = StatePointers.of(spans, size=vectors.state_size)
    count, lacking = sum(span.rows for span in spans), -vectors.heads % LANE_BLOCK
    rows = floats(rows, (count, vectors.inputs), "rows")
    if lacking:  # steps are read in whole vectors
        rows = np.pad(rows, ((0, 0), (0, lacking)))
    mixed = np.empty((count, vectors.channels + 2 * (vectors.heads + lacking)), np.float32)
    out = np.empty((count, vectors.inner), np.float32)
    call = _Call(
        _layer(LinearLayer(), vectors),
        pointers,
        address(rows),
        address(mixed),
        address(out),
        len(spans),
        count,
        threads,
    )
    library.edgellm_mamba2(ctypes.byref(call))
    return out
