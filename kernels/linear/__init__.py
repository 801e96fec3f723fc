"""Quantized linear layers in panels: int4 and int8 weights, int8 activations, groups of 32."""

from edgellm.kernels.linear.panels import (
    PANEL,
    Kind,
    Panels,
    int4_panels,
    int8_panels,
    int8_rows,
    kind_of,
    panels_shape,
)

__all__ = [
    "PANEL",
    "Kind",
    "Panels",
    "int4_panels",
    "int8_panels",
    "int8_rows",
    "kind_of",
    "panels_shape",
]
