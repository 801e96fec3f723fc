"""RoPE frequencies of a model, with the scaling that its config asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.config import Fields

# Checked before the frequencies are computed, which is before the config as a whole is.
_MAX_DIM = 1 << 12


def base_frequencies(dim: int, theta: float) -> NDArray[np.float64]:
    """`theta ** (-2i / dim)` for the `dim / 2` rotated pairs (arXiv:2104.09864, eq. 15)."""
    if not 0 < dim <= _MAX_DIM or dim % 2 or theta <= 0:
        raise ModelFormatError(
            f"RoPE dimension {dim} and base {theta}: an even dimension of at most {_MAX_DIM} and "
            "a positive base are expected"
        )
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def scale_linear(inv_freq: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Position interpolation (arXiv:2306.15595)."""
    return inv_freq / _positive(factor, "factor")


def scale_llama3(inv_freq: NDArray[np.float64], fields: Fields) -> NDArray[np.float64]:
    """Llama 3.1's rule: low frequencies are divided by `factor`, high ones kept, between blended.

    As in Meta's reference code (llama_models, `apply_scaling`) and transformers' "llama3" type.
    """
    factor = _positive(fields.read(float, "factor"), "factor")
    low = fields.read(float, "low_freq_factor")
    high = fields.read(float, "high_freq_factor")
    original = fields.read(int, "original_max_position_embeddings")
    if high <= low:
        raise ModelFormatError(f"rope_scaling: high_freq_factor {high} must be above {low}")
    wavelength = 2 * math.pi / inv_freq
    smooth = ((original / wavelength - low) / (high - low)).clip(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def scale_by_factors(
    inv_freq: NDArray[np.float64], factors: Sequence[float]
) -> NDArray[np.float64]:
    """GGUF's `rope_freqs.weight`: one divisor a pair, which holds the llama3 rule precomputed."""
    divisors = np.asarray(factors, np.float64)
    if divisors.shape != inv_freq.shape or not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ModelFormatError(
            f"rope_freqs.weight has shape {divisors.shape}; expected {inv_freq.shape[0]} "
            "positive numbers"
        )
    return inv_freq / divisors


def from_hf(values: Mapping[str, Any], *, dim: int, origin: str) -> tuple[float, ...]:
    """Frequencies from a `config.json`: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    fields = Fields(values, origin=origin)
    scaling = fields.optional(dict, "rope_parameters") or fields.optional(dict, "rope_scaling")
    scaling_fields = Fields(scaling or {}, origin=f"{origin}: rope_scaling")
    theta = scaling_fields.optional(float, "rope_theta") or fields.optional(float, "rope_theta")
    inv_freq = base_frequencies(dim, theta or 10000.0)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "linear":
        inv_freq = scale_linear(inv_freq, scaling_fields.read(float, "factor"))
    elif kind == "llama3":
        inv_freq = scale_llama3(inv_freq, scaling_fields)
    elif kind != "default":
        raise UnsupportedModelError(
            f"{origin}: RoPE scaling {kind!r} is not supported; supported are default, linear "
            "and llama3"
        )
    return tuple(inv_freq.tolist())


def _positive(value: float, name: str) -> float:
    if value <= 0:
        raise ModelFormatError(f"rope_scaling: {name} is {value}; it must be positive")
    return value
