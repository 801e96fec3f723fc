"""Checked reads of scales from Hugging Face folders."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.graphs.safetensors_folder import SafetensorsFolder

Floats = NDArray[np.float32]

_EXPONENT_BIAS = 127
_EXPONENT_OF_NAN = 255


def read_scales(folder: SafetensorsFolder, key: str) -> Floats:
    """Read a tensor of scales as float32.

    Raises:
        ModelFormatError: a scale is infinite or not a number.
    """
    values = folder.read(key).astype(np.float32)
    if not np.isfinite(values).all():
        raise _not_finite(folder, key)
    return values


def read_powers_of_two(folder: SafetensorsFolder, key: str) -> Floats:
    """Read a tensor of E8M0 scales, bytes `e` for `2^(e - 127)`, as float32.

    Raises:
        ModelFormatError: a scale is the byte for "not a number".
    """
    exponents = folder.read(key).view(np.uint8)
    if (exponents == _EXPONENT_OF_NAN).any():
        raise _not_finite(folder, key)
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _EXPONENT_BIAS)


def _not_finite(folder: SafetensorsFolder, key: str) -> ModelFormatError:
    return ModelFormatError(
        f"{folder.entry(key).file}: tensor {key} holds a scale that is infinite or not a number; "
        "the file is damaged, download it again"
    )
