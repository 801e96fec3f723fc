"""Alternating updates: a layer computes one of several residual streams, and predicts others."""

from edgellm.kernels.altup.weights import MOST_STREAMS, AltUpWeights, Streams

__all__ = ["MOST_STREAMS", "AltUpWeights", "Streams"]
