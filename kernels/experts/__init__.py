"""Mixture of experts: a router sends each row through a few of many MLPs."""

from edgellm.kernels.experts.routing import Routing

__all__ = ["Routing"]
