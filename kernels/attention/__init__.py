"""Causal attention of a chunk of queries over the KV blocks of one sequence (GQA)."""

from edgellm.kernels.attention.portable import attend

__all__ = ["attend"]
