"""Weights around latents, as C++ reads them."""

from __future__ import annotations

import ctypes

from edgellm.kernels.latent.weights import LatentWeights
from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.native import address


class LatentLayer(ctypes.Structure):
    """Weights around latents; the fields are those of call.h, in their order."""

    _fields_ = [
        *((name, LinearLayer) for name in ("query_down", "key_up", "value_up")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "norm")),
        ("epsilon", ctypes.c_float),
    ]

    @classmethod
    def of(cls, weights: LatentWeights | None) -> LatentLayer:
        """Point at the weights, which must outlive the structure."""
        if weights is None:
            return cls()
        linears = weights.query_down, weights.key_up, weights.value_up
        norms = weights.query_norm, weights.norm
        return cls(*map(layer_of, linears), *map(address, norms), weights.epsilon)
