"""All layers of a few tokens in one call, from the embedding to the logits."""

from edgellm.kernels.step.native import FusedStep
from edgellm.kernels.step.span import StepSpan
from edgellm.kernels.step.weights import LayerWeights, Weights

__all__ = ["FusedStep", "LayerWeights", "StepSpan", "Weights"]
