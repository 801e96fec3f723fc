"""Quantized linear layers in panels: weights of 4 to 8 bits, int8 activations in groups of 32."""

from edgellm.kernels.linear.panels import (
    PANEL,
    Panels,
    from_panels,
    panels_shape,
    rows_of,
    to_panels,
)

__all__ = ["PANEL", "Panels", "from_panels", "panels_shape", "rows_of", "to_panels"]
