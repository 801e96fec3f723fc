"""Gated delta net: a recurrence over the rows of a sequence in place of attention."""

from edgellm.kernels.delta_net.weights import DeltaNetWeights, DeltaRule

__all__ = ["DeltaNetWeights", "DeltaRule"]
