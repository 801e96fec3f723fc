"""Checkpoint in, bundle out. The runtime needs nothing of it but for a model's first use."""

from edgellm.export.exporter import (
    DEFAULT_CHUNK_SIZES,
    DEFAULT_PRECISIONS,
    check_chunk_sizes,
    check_precisions,
    default_precisions,
    export,
)

__all__ = [
    "DEFAULT_CHUNK_SIZES",
    "DEFAULT_PRECISIONS",
    "check_chunk_sizes",
    "check_precisions",
    "default_precisions",
    "export",
]
