"""Mamba-2: a convolution over the last rows, and states that decay as each row says."""

from edgellm.kernels.mamba2.weights import LANE_BLOCK, Mamba2Vectors, Mamba2Weights

__all__ = ["LANE_BLOCK", "Mamba2Vectors", "Mamba2Weights"]
