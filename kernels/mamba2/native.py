"""Mamba-2 in C++ (`cpu.h`) on the rows of some sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.mamba2.weights import LANE_BLOCK, Mamba2Vectors, Mamba2Weights
from edgellm.kernels.native import address

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


class _Target(ctypes.Structure):
    """Place of a state; the fields are those of step/call.h, in their order."""

    _fields_ = [("state", ctypes.c_void_p), ("rows", ctypes.c_int32)]


class _Rows(ctypes.Structure):
    """Rows of a sequence; the fields are those of call.h, in their order."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
    ]


class _Call(ctypes.Structure):
    """Arguments of one call of Mamba-2; the fields are those of call.h, in their order."""

    _fields_ = [
        ("layer", Mamba2Layer),
        ("spans", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("rows", "mixed", "out")),
        *((name, ctypes.c_int32) for name in ("span_count", "count", "threads")),
    ]


@dataclass(frozen=True)
class StateRows:
    """Rows of one sequence.

    Attributes:
        source: state before the first row `[state_size]`; None: all numbers are 0.
        targets: numbers of rows in ascending order, and the array that takes the state after them.
            The last is for all rows; the first array may be the source.
    """

    source: Floats | None
    targets: Sequence[tuple[int, Floats]]


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
    ends = [span.targets[-1][0] for span in spans]
    padded_heads = -(-vectors.heads // LANE_BLOCK) * LANE_BLOCK
    padded = np.zeros((sum(ends), vectors.inputs + padded_heads - vectors.heads), np.float32)
    padded[:, : vectors.inputs] = floats(rows, (sum(ends), vectors.inputs), "rows")
    mixed = np.empty((len(rows), vectors.channels + 2 * padded_heads), np.float32)
    out = np.empty((len(rows), vectors.inner), np.float32)
    targets = [_targets(span, vectors) for span in spans]
    places = (_Rows * len(spans))(
        *(
            _Rows(address(span.source), ctypes.addressof(each), end)
            for span, each, end in zip(spans, targets, ends, strict=True)
        )
    )
    call = _Call(
        _layer(LinearLayer(), vectors),
        ctypes.addressof(places),
        address(padded),
        address(mixed),
        address(out),
        len(spans),
        len(rows),
        threads,
    )
    library.edgellm_mamba2(ctypes.byref(call))
    return out


def _targets(span: StateRows, vectors: Mamba2Vectors) -> ctypes.Array[_Target]:
    for state in (span.source, *(state for _, state in span.targets)):
        if state is not None and not state.flags.c_contiguous:
            raise ValueError("a state has no gaps")
        if state is not None:
            floats(state, (vectors.state_size,), "state")
    return (_Target * len(span.targets))(
        *(_Target(address(state), rows) for rows, state in span.targets)
    )
