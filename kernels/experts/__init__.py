"""Mixture of experts: a router sends each row through a few of many MLPs."""

from edgellm.kernels.experts.routing import Routing, Scores

__all__ = ["Routing", "Scores"]
