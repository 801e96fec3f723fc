"""Attention over latents: K and V of all heads are made of one vector of each token."""

from edgellm.kernels.latent.weights import LatentWeights

__all__ = ["LatentWeights"]
