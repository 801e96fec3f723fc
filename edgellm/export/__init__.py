"""Export of a checkpoint to a bundle; the runtime needs it only at a model's first use."""

from edgellm.export.calibrate import ROUNDINGS, CalibrationOptions, Rounding
from edgellm.export.exporter import export
from edgellm.export.precisions import (
    DEFAULT_CHUNK_SIZES,
    DEFAULT_PRECISIONS,
    PRECISIONS,
    check_chunk_sizes,
    check_precisions,
    default_precisions,
)
from edgellm.export.weight_reader import FLOAT_WEIGHTS
from edgellm.quantize.calibration import METHODS, Method

__all__ = [
    "DEFAULT_CHUNK_SIZES",
    "DEFAULT_PRECISIONS",
    "FLOAT_WEIGHTS",
    "METHODS",
    "PRECISIONS",
    "ROUNDINGS",
    "CalibrationOptions",
    "Method",
    "Rounding",
    "check_chunk_sizes",
    "check_precisions",
    "default_precisions",
    "export",
]
