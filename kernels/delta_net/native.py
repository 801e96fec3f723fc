"""The gated delta net in C++ (`cpu.h`) over rows of several sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.checks import floats
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.linear import PANEL
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.native import StatePointers, address
from edgellm.kernels.state_blocks import StateRows

Floats = NDArray[np.float32]


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


class _Call(ctypes.Structure):
    """Arguments of one call; the fields are those of call.h, in their order."""

    _fields_ = [
        ("net", DeltaNetLayer),
        ("in", ctypes.c_void_p),
        ("spans", ctypes.POINTER(StatePointers)),
        ("out", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("span_count", "rows", "threads")),
    ]


def delta_net(
    library: ctypes.CDLL,
    rows: Floats,
    net: DeltaNetWeights,
    spans: Sequence[StateRows],
    *,
    epsilon: float,
    threads: int = 1,
) -> Floats:
    """Compute what the output projection reads, `[C, size]`, and write the states.

    Args:
        library: the compiled kernels.
        rows: what the projections give, side by side: q, k and v, then z, a and b.
        spans: rows of the sequences, one behind the other.
        epsilon: epsilon of the norms of the outputs.

    Raises:
        ValueError: rows or spans do not fit.
    """
    pointers = StatePointers.of(spans, size=net.state_size)
    count, lacking = sum(span.rows for span in spans), -net.value_heads % PANEL
    rows = floats(rows, (count, net.inputs), "rows")
    if lacking:  # a and b are whole panels
        ends = [net.channels + net.size, net.inputs - net.value_heads]
        first, a, b = np.split(rows, ends, axis=1)
        rows = np.concatenate([first, *(np.pad(x, ((0, 0), (0, lacking))) for x in (a, b))], axis=1)
    out = np.empty((count, net.size), np.float32)
    numbers = 2 * net.keys + net.size + 3 * net.value_heads
    workspace = np.empty(count * numbers, np.float32)
    call = _Call(
        DeltaNetLayer.of(net),
        address(rows),
        pointers,
        address(out),
        address(workspace),
        epsilon,
        len(spans),
        count,
        threads,
    )
    library.edgellm_delta_net(ctypes.byref(call))
    return out
