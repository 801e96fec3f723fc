"""Quantized linear layers: packed weights of 4 to 8 bits, int8 activations in groups of 32."""

from edgellm.kernels.linear.packed import (
    PANEL,
    PackedWeights,
    first_rows,
    pack_weight,
    packed_shape,
    rows_of,
    unpack_weight,
)

__all__ = [
    "PANEL",
    "PackedWeights",
    "first_rows",
    "pack_weight",
    "packed_shape",
    "rows_of",
    "unpack_weight",
]
