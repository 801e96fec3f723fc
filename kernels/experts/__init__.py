"""Mixture of experts: a router sends each row through a few of many MLPs."""

from edgellm.kernels.experts.memory import ExpertMemory, ExpertUse
from edgellm.kernels.experts.routing import Routing, Scores

__all__ = ["ExpertMemory", "ExpertUse", "Routing", "Scores"]
