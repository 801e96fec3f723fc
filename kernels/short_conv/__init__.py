"""Gated short convolution: `C * conv(B * x)`, a filter of a few taps for each channel."""

from edgellm.kernels.short_conv.weights import ShortConvWeights

__all__ = ["ShortConvWeights"]
