"""The gated delta net in C++ (`cpu.h`) over rows of several sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.delta_net.weights import DeltaNetWeights
from edgellm.kernels.linear import PANEL
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.native import address

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class DeltaSpan:
    """Consecutive rows of one sequence, and the states before and after them.

    Attributes:
        source: state before the first row; None: all zeros.
        targets: numbers of rows, in order, and the arrays that take the state after them; the last
            is for the state after all rows. One may be the source.
    """

    rows: int
    source: Floats | None
    targets: Sequence[tuple[int, Floats]]


class DeltaNetLayer(ctypes.Structure):
    """Gated delta net of a layer; the fields are those of call.h, in their order.

    Decay rates act on all tokens behind, so a and b, 1 % of the projections, take 16-bit inputs.
    """

    _fields_ = [
        *((name, LinearLayer) for name in ("qkv", "z", "a", "b")),
        *((name, ctypes.c_void_p) for name in ("conv", "decay", "dt_bias", "norm")),
        *((name, ctypes.c_int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int32) for name in ("taps", "tiled")),
    ]

    @classmethod
    def of(cls, net: DeltaNetWeights) -> DeltaNetLayer:
        """Point at the weights, which must outlive the structure."""
        return cls(
            layer_of(net.qkv),
            layer_of(net.z),
            layer_of(net.a, fine=True),
            layer_of(net.b, fine=True),
            *(address(each) for each in (net.conv, net.decay, net.dt_bias, net.norm)),
            *(net.key_heads, net.value_heads, net.key_dim, net.value_dim, net.taps, net.tiled),
        )


class _Target(ctypes.Structure):
    """Target of a state; the fields are those of call.h, in their order."""

    _fields_ = [("block", ctypes.c_void_p), ("rows", ctypes.c_int32)]


class _Span(ctypes.Structure):
    """Span of a call; the fields are those of call.h, in their order."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("targets", ctypes.POINTER(_Target)),
        ("rows", ctypes.c_int32),
    ]


class _Call(ctypes.Structure):
    """Arguments of one call; the fields are those of call.h, in their order."""

    _fields_ = [
        ("net", DeltaNetLayer),
        ("in", ctypes.c_void_p),
        ("spans", ctypes.POINTER(_Span)),
        ("out", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("span_count", "rows", "threads")),
    ]


def delta_net(
    library: ctypes.CDLL,
    net: DeltaNetWeights,
    projections: tuple[Floats, Floats, Floats, Floats],
    epsilon: float,
    spans: Sequence[DeltaSpan],
    *,
    threads: int = 1,
) -> Floats:
    """Compute what the output projection reads, `[C, size]`, and write the states.

    Args:
        library: the compiled kernels.
        projections: those of all rows, as in `reference.py`.
        epsilon: epsilon of the norms of the outputs.
        spans: rows of the sequences, one behind the other.

    Raises:
        ValueError: projections or spans do not fit.
    """
    rows = sum(span.rows for span in spans)
    for span in spans:
        _check(span, net)
    given = np.concatenate([_in_panels(each) for each in projections], axis=1)
    a, width = -(-net.a.outputs // PANEL) * PANEL, net.channels + net.size
    source = floats(given, (rows, width + 2 * a), "projections")
    out = np.empty((rows, net.size), np.float32)
    numbers = 2 * net.keys + net.size + 3 * net.value_heads
    workspace = np.empty(rows * numbers, np.float32)
    targets = [
        (_Target * len(span.targets))(*(_Target(address(to), n) for n, to in span.targets))
        for span in spans
    ]
    call = _Call(
        DeltaNetLayer.of(net),
        address(source),
        (_Span * len(spans))(
            *(
                _Span(address(span.source), to, span.rows)
                for span, to in zip(spans, targets, strict=True)
            )
        ),
        address(out),
        address(workspace),
        epsilon,
        len(spans),
        rows,
        threads,
    )
    library.edgellm_delta_net(ctypes.byref(call))
    return out


def _in_panels(x: Floats) -> Floats:
    """Return rows padded to whole panels, as the products leave them."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % PANEL)))


def _check(span: DeltaSpan, net: DeltaNetWeights) -> None:
    ends = [rows for rows, _ in span.targets]
    if ends != sorted(set(ends)) or not ends or ends[0] < 1 or ends[-1] != span.rows:
        raise ValueError(f"targets after {ends} rows; needed are rising ones up to {span.rows}")
    for state in (span.source, *(to for _, to in span.targets)):
        size = (net.state_size,)
        if state is not None and floats(state, size, "state") is not state:
            raise ValueError("a state has no gaps")
