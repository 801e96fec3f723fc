"""Quantize K and V rows to the cache's format and write them into a sequence's blocks."""

from edgellm.kernels.kv_append.portable import append

__all__ = ["append"]
