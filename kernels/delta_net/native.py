"""The gated delta net in C++ (`cpu.h`) over rows of several sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.delta_net.weights import DeltaNetWeights
from edgellm.kernels.native import address

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class StateSpan:
    """Consecutive rows of one sequence, and the states before and after them.

    Attributes:
        source: state before the first row; None: all zeros.
        targets: numbers of rows, in order, and the arrays that take the state after them; the last
            is for the state after all rows, and may be the source.
    """

    rows: int
    source: Floats | None
    targets: Sequence[tuple[int, Floats]]


class NetPointers(ctypes.Structure):
    """DeltaNetWeights for C++; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("conv", "decay", "dt_bias", "norm")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int32) for name in ("taps", "tiled")),
    ]

    @classmethod
    def of(cls, net: DeltaNetWeights) -> NetPointers:
        """Point at the weights, which must outlive the structure."""
        return cls(
            *(address(each) for each in (net.conv, net.decay, net.dt_bias, net.norm)),
            net.epsilon,
            *(net.key_heads, net.value_heads, net.key_dim, net.value_dim, net.taps, net.tiled),
        )


class _Inputs(ctypes.Structure):
    """Projections of all rows; the fields are those of call.h, in their order."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("step", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in ("z", "a", "b")),
    ]


class _Target(ctypes.Structure):
    """Target of a state; the fields are those of call.h, in their order."""

    _fields_ = [("state", ctypes.c_void_p), ("rows", ctypes.c_int32)]


class _Span(ctypes.Structure):
    """Span of a call; the fields are those of call.h, in their order."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("targets", ctypes.POINTER(_Target)),
        *((name, ctypes.c_int32) for name in ("target_count", "rows")),
    ]


class _Call(ctypes.Structure):
    """Arguments of one call; the fields are those of call.h, in their order."""

    _fields_ = [
        ("net", NetPointers),
        ("inputs", _Inputs),
        ("spans", ctypes.POINTER(_Span)),
        ("out", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("span_count", "rows", "threads")),
    ]


def delta_net(
    library: ctypes.CDLL,
    net: DeltaNetWeights,
    inputs: Floats,
    spans: Sequence[StateSpan],
    *,
    threads: int = 1,
) -> Floats:
    """Compute what the output projection reads, `[C, values]`, and write the states.

    Args:
        library: the compiled kernels.
        inputs: q, k and v before the convolution, z, a and b of each row,
            `[C, channels + values + 2 * value_heads]`.
        spans: rows of the sequences, one behind the other.

    Raises:
        ValueError: weights, inputs or spans do not fit.
    """
    net.check()
    rows = sum(span.rows for span in spans)
    z = net.channels
    a = z + net.values
    b = a + net.value_heads
    width = b + net.value_heads
    source = floats(inputs, (rows, width), "inputs")
    for span in spans:
        _check(span, net)
    out = np.empty((rows, net.values), np.float32)
    workspace = np.empty(
        rows * (2 * net.keys + net.values + 3 * net.value_heads), np.float32
    )  # DeltaNetBuffers::floats
    targets = [
        (_Target * len(span.targets))(*(_Target(address(to), n) for n, to in span.targets))
        for span in spans
    ]
    call = _Call(
        NetPointers.of(net),
        _Inputs(address(source), width, z, a, b),
        (_Span * len(spans))(
            *(
                _Span(address(span.source), to, len(to), span.rows)
                for span, to in zip(spans, targets, strict=True)
            )
        ),
        address(out),
        address(workspace),
        len(spans),
        rows,
        threads,
    )
    library.edgellm_delta_net(ctypes.byref(call))
    return out


def _check(span: StateSpan, net: DeltaNetWeights) -> None:
    ends = [rows for rows, _ in span.targets]
    if ends != sorted(set(ends)) or not ends or ends[0] < 1 or ends[-1] != span.rows:
        raise ValueError(f"targets after {ends} rows; needed are rising ones up to {span.rows}")
    for state in (span.source, *(to for _, to in span.targets)):
        size = (net.state_size,)
        if state is not None and floats(state, size, "state") is not state:
            raise ValueError("a state has no gaps")
