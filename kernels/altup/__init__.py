"""Alternating updates: a layer computes one of several residual streams, and predicts the others."""

from edgellm.kernels.altup.weights import AltUpWeights, Streams

__all__ = ["AltUpWeights", "Streams"]
