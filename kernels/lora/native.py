"""Structures of adapters for the C++ step (`call.h`)."""

from __future__ import annotations

import ctypes

from edgellm.kernels.lora.weights import CHANGED, AdapterWeights, PackedChange
from edgellm.kernels.native import address


class _LowRank(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "scale")),
        *((name, ctypes.c_int32) for name in ("rank", "a_step", "b_step", "scale_step")),
    ]

    @classmethod
    def of(cls, change: PackedChange | None) -> _LowRank:
        if change is None:
            return cls()
        matrices = (address(x) for x in (change.a, change.b, change.scale))
        return cls(*matrices, change.rank, *change.steps)


class _LayerChanges(ctypes.Structure):
    _fields_ = [(name, _LowRank) for name in CHANGED]


class _Adapter(ctypes.Structure):
    _fields_ = [("layers", ctypes.POINTER(_LayerChanges)), ("rank", ctypes.c_int32)]


class NativeAdapter:
    """Structure of an adapter that keeps its matrices alive.

    Attributes:
        address: where C++ finds it.
    """

    def __init__(self, weights: AdapterWeights) -> None:
        self._matrices = weights.layers  # not the adapter, which is the key of its structure
        layers = (
            _LayerChanges(*(_LowRank.of(layer.get(name)) for name in CHANGED))
            for layer in weights.layers
        )
        self._layers = (_LayerChanges * len(weights.layers))(*layers)
        self._adapter = _Adapter(self._layers, weights.rank)
        self.address = ctypes.addressof(self._adapter)
