"""Weights of a layer with several residual streams, as C++ reads them."""

from __future__ import annotations

import ctypes

from edgellm.kernels.altup import AltUpWeights
from edgellm.kernels.native import address

_FIELDS = ("router_norm", "router", "predict", "correct", "scale")


class AltUpLayer(ctypes.Structure):
    """Weights around streams; the fields are those of call.h, in their order."""

    _fields_ = [(name, ctypes.c_void_p) for name in _FIELDS]

    @classmethod
    def of(cls, weights: AltUpWeights | None) -> AltUpLayer:
        """Point at the weights, which must outlive the structure."""
        if weights is None:
            return cls()
        return cls(*(address(getattr(weights, name)) for name in _FIELDS))
