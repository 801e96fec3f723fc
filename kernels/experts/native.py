"""Routers and shared experts of layers, as C++ reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.experts import Routing
from edgellm.kernels.linear import PackedWeights
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.native import address

# Vectors of the structures, as `LayerWeights` names them, in the order of call.h.
ROUTER_VECTORS = ("router", "router_bias", "selection_bias", "expert_scale")
BESIDE = ("shared_post_norm", "experts_post_norm", "experts_norm", "router_norm")
SHARED_VECTORS = ("shared_router", *BESIDE)
Vectors = Sequence[NDArray[np.float32] | None]
_NUMBERS = ("experts", "used", "normalized", "sigmoid", "groups", "used_groups")


class RouterLayer(ctypes.Structure):
    """Router of a layer; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ROUTER_VECTORS),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("scale", ctypes.c_float),
    ]

    @classmethod
    def of(cls, routing: Routing | None, vectors: Vectors) -> RouterLayer:
        """Point at the vectors, which must outlive the structure."""
        if routing is None:
            return cls()
        return cls(
            *map(address, vectors),
            routing.experts,
            routing.used,
            routing.normalized,
            routing.scores == "sigmoid",
            routing.groups,
            routing.used_groups,
            routing.scale,
        )


class SharedExpertLayer(ctypes.Structure):
    """Expert that all rows go through; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, LinearLayer) for name in ("gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in SHARED_VECTORS),
    ]

    @classmethod
    def of(cls, linears: Sequence[PackedWeights] | None, vectors: Vectors) -> SharedExpertLayer:
        """Point at gate, up and down and the vectors, which must outlive the structure."""
        return cls() if linears is None else cls(*map(layer_of, linears), *map(address, vectors))
