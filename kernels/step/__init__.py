"""All layers of a few tokens in one call, from the embedding to the logits."""

from edgellm.kernels.step.native import FusedStep, LayerWeights, Weights

__all__ = ["FusedStep", "LayerWeights", "Weights"]
