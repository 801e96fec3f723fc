"""Fused step: all layers for some tokens in one call, from the embedding to the logits."""

from edgellm.kernels.step.native import FusedStep
from edgellm.kernels.step.span import LayerGroup, StepSpan
from edgellm.kernels.step.weights import Laurel, LayerInput, LayerTable, LayerWeights, Weights

__all__ = [
    "FusedStep",
    "Laurel",
    "LayerGroup",
    "LayerInput",
    "LayerTable",
    "LayerWeights",
    "StepSpan",
    "Weights",
]
