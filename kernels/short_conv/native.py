"""A short convolution as the fused step in C++ sees it (`cpu.h`)."""

from __future__ import annotations

import ctypes

from edgellm.kernels.linear.native import LinearLayer, layer_of
from edgellm.kernels.native import address
from edgellm.kernels.short_conv.weights import ShortConvWeights


class ShortConvLayer(ctypes.Structure):
    """Short convolution of a layer; the fields are those of call.h, in their order."""

    _fields_ = [("in", LinearLayer), ("filters", ctypes.c_void_p), ("taps", ctypes.c_int32)]

    @classmethod
    def of(cls, weights: ShortConvWeights) -> ShortConvLayer:
        """Point at the weights, which must outlive the structure."""
        return cls(layer_of(weights.conv_in), address(weights.filters), len(weights.filters))
