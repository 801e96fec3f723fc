"""RoPE of a model, with the scaling that the model's file asks for.

The rules are those of transformers (`modeling_rope_utils.py`) and llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.architecture import GGUFHeader
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import Rope
from edgellm.graphs.layer_kinds import SLIDING

Frequencies = NDArray[np.float64]

# Limit of the rotated channels, checked before frequencies are computed and the config is checked.
_MAX_DIM = 1 << 12
_THETA = 10000.0
# Keys of `rope_scaling` that some types of scaling use, and that the other types ignore.
_KEYS = (
    "attention_factor", "attn_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor",
    "llama_4_scaling_beta", "long_factor", "low_freq_factor", "max_position_embeddings",
    "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "rope_theta", "rope_type", "short_factor", "truncate",
    "type",
)  # fmt: skip
_LONGROPE = ("longrope", "su")
# Limit of alpha, far above every model, and small enough to be raised to a power as a float.
_MAX_ALPHA = 1e12


def base_frequencies(dim: int, theta: float) -> Frequencies:
    """Return `theta ** (-2i / dim)` for the `dim / 2` rotated pairs (arXiv:2104.09864, eq. 15)."""
    if not 0 < dim <= _MAX_DIM or dim % 2 or theta <= 0:
        raise ModelFormatError(
            f"RoPE dimension {dim} and base {theta}: an even dimension of at most {_MAX_DIM} and "
            "a positive base are expected"
        )
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def scale_linear(inv_freq: Frequencies, factor: float) -> Frequencies:
    """Scale frequencies by position interpolation (arXiv:2306.15595)."""
    return inv_freq / _positive(factor, "factor")


def scale_llama3(inv_freq: Frequencies, fields: Fields) -> Frequencies:
    """Scale frequencies by Llama 3.1's rule.

    Low frequencies are divided by `factor`, high ones are kept, and between them both are blended.
    The rule is that of Meta's reference code (llama_models, `apply_scaling`) and of the type
    "llama3" in transformers.
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


def scale_yarn(
    inv_freq: Frequencies,
    *,
    theta: float,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Frequencies:
    """Scale frequencies by YaRN (arXiv:2309.00071, section 3.2).

    Pairs that turn slowly are interpolated, fast pairs are kept, and between them both are blended.

    Args:
        original: context that the model was trained with before its extension, in tokens.
        beta_fast: turns in that context from which on a pair is kept.
        beta_slow: turns in that context up to which a pair is interpolated.
        truncate: whether the limits of the blended pairs are rounded outwards.
    """
    if theta <= 1 or original < 1 or beta_fast <= 0 or beta_slow <= 0:
        raise ModelFormatError(
            f"rope_scaling: YaRN with base {theta}, original context {original}, beta_fast "
            f"{beta_fast} and beta_slow {beta_slow}: a base above 1 and positive numbers are "
            "expected"
        )
    pairs = len(inv_freq)

    def pair_of(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    interpolated = ((np.arange(pairs) - low) / (high - low)).clip(0, 1)
    factor = _positive(factor, "factor")
    scaled: Frequencies = inv_freq / factor * interpolated + inv_freq * (1 - interpolated)
    return scaled


def scale_by_factors(
    inv_freq: Frequencies, factors: Sequence[float], name: str = "rope_freqs.weight"
) -> Frequencies:
    """Divide the frequency of each pair by its own factor.

    LongRoPE has such factors (arXiv:2402.13753), and GGUF files, which precompute the llama3 rule.
    """
    try:
        divisors = np.asarray(factors, np.float64)
    except (TypeError, ValueError):
        divisors = np.zeros(0)
    if divisors.shape != inv_freq.shape or not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ModelFormatError(
            f"{name} has shape {divisors.shape}; expected {inv_freq.shape[0]} positive numbers"
        )
    return inv_freq / divisors


def stretch(config: ModelConfig, factor: float) -> ModelConfig:
    """Return a config with a context `factor` times as long, by YaRN (see `scale_yarn`).

    RoPE of layers with windows stays as it is, unless layers that see all positions share it.

    Raises:
        UnsupportedModelError: no such layer has RoPE, or its frequencies are scaled already.
    """
    seen = {each.rope for each in config.attentions.values() if each.window is None}
    turning = [i for i in seen if any(config.ropes[i].inv_freq)]
    if not turning:
        raise UnsupportedModelError(
            "`rope_scale`: no layer of the model sees all positions by RoPE; leave it out"
        )
    ropes = list(config.ropes)
    for i in turning:
        inv_freq = np.asarray(ropes[i].inv_freq)
        theta = _base_of(inv_freq) if ropes[i].magnitude == 1 else None
        if theta is None:
            raise UnsupportedModelError(
                "`rope_scale`: the model's own files scale RoPE already; leave it out"
            )
        scaled = scale_yarn(inv_freq, theta=theta, factor=factor, original=config.context_length)
        ropes[i] = _rope(scaled, _yarn_magnitude(factor))
    length = int(config.context_length * factor)
    return replace(config, ropes=tuple(ropes), context_length=length)


def _base_of(inv_freq: Frequencies) -> float | None:
    """Return the base of frequencies that nothing has scaled, by all their pairs; else None."""
    turning = inv_freq[: np.count_nonzero(inv_freq)]
    if len(turning) < 2 or turning[0] != 1:
        return None
    powers = turning[1] ** np.arange(len(turning))
    return turning[1] ** -len(inv_freq) if np.allclose(turning, powers, rtol=1e-5) else None


def plain(dim: int, theta: float) -> Rope:
    """Return RoPE without scaling."""
    return _rope(base_frequencies(dim, theta))


def no_rotation(like: Rope) -> Rope:
    """Return the RoPE of layers without positions (NoPE, arXiv:2305.19466): every angle is 0."""
    return Rope(inv_freq=(0.0,) * len(like.inv_freq))


def hf_settings(
    fields: Fields, layer_type: str | None = None, theta: float | None = None
) -> Fields:
    """Collect the RoPE settings of a `config.json` under the keys of `rope_parameters`.

    Args:
        layer_type: type of the layers whose settings to take, if each type has its own.
        theta: default of `rope_theta` in these settings, in place of the file's outer `rope_theta`.

    Raises:
        ModelFormatError: the file has two descriptions of RoPE that differ.
        UnsupportedModelError: each type of layers has its own settings, and `layer_type` is none of
            them.
    """
    nested = fields.optional(dict, "rope_parameters") or {}
    older = fields.optional(dict, "rope_scaling") or {}
    if nested and older and nested != older:
        raise ModelFormatError(
            f"{fields.origin}: rope_parameters and rope_scaling differ; take config.json from "
            "where the weights come from"
        )
    nested = nested or older
    origin = f"{fields.origin}: rope_scaling"
    if layer_type in nested:
        nested, origin = nested[layer_type] or {}, f"{origin}: {layer_type}"
        if not isinstance(nested, dict):
            raise ModelFormatError(f"{origin} is {nested!r}; expected an object")
    for key, value in nested.items():
        if isinstance(value, dict):
            raise UnsupportedModelError(
                f"{origin} has settings of its own for {key!r}; supported are the same for all "
                "layers"
            )
    values: dict[str, Any] = {
        "rope_theta": fields.positive("rope_theta", default=_THETA) if theta is None else theta,
        "partial_rotary_factor": fields.optional(float, "partial_rotary_factor"),
        "original_max_position_embeddings": fields.optional(int, "max_position_embeddings"),
        **{key: value for key, value in nested.items() if value is not None},
    }
    values["rope_type"] = values.get("rope_type", values.get("type", "default"))
    outer = fields.optional(int, "original_max_position_embeddings")
    if outer is not None:
        values["original_max_position_embeddings"] = outer
    return Fields(values, origin=origin)


def _alpha(settings: Fields) -> float:
    """Read alpha of Hunyuan's rule; released models stay far below its limit."""
    alpha = _positive(settings.read(float, "alpha"), "alpha")
    if alpha > _MAX_ALPHA:
        raise ModelFormatError(
            f"{settings.origin}: alpha is {alpha}; at most {_MAX_ALPHA:g} is allowed"
        )
    return alpha


def from_hf(
    fields: Fields,
    *,
    head_dim: int,
    layer_type: str | None = None,
    theta: float | None = None,
    partial: bool = False,
) -> Rope:
    """Read RoPE from a `config.json`: `rope_parameters`, or `rope_theta` and `rope_scaling`.

    Args:
        layer_type, theta: as in `hf_settings`.
        partial: whether `partial_rotary_factor` counts, which most families ignore.
    """
    settings = hf_settings(fields, layer_type, theta)
    share = settings.optional(float, "partial_rotary_factor")
    dim = int(head_dim * share) if partial and share is not None else head_dim
    theta = settings.read(float, "rope_theta")
    kind = settings.read(str, "rope_type")
    magnitude = 1.0
    if kind == "dynamic" and "alpha" in settings:
        # Hunyuan's rule: the base does not depend on the length
        theta *= _alpha(settings) ** (dim / max(dim - 2, 1))
    inv_freq = base_frequencies(dim, theta)
    if kind == "linear":
        inv_freq = scale_linear(inv_freq, settings.read(float, "factor"))
    elif kind == "llama3":
        inv_freq = scale_llama3(inv_freq, settings)
    elif kind == "yarn":
        inv_freq, magnitude = _yarn_of_hf(inv_freq, settings, theta)
    elif kind in _LONGROPE:
        inv_freq = scale_by_factors(inv_freq, settings.read(list, "short_factor"), "short_factor")
        magnitude = _longrope_magnitude(settings, fields)
    elif kind == "proportional":
        turning = int(head_dim * (1.0 if share is None else share) // 2)
        inv_freq = scale_linear(inv_freq, settings.optional(float, "factor") or 1.0)
        inv_freq[turning:] = 0
    # the dynamic rule changes nothing up to max_position_embeddings, where our context ends
    elif kind not in ("default", "dynamic"):
        raise UnsupportedModelError(
            f"{fields.origin}: RoPE scaling {kind!r} is not supported; supported are default, "
            "linear, dynamic, llama3, yarn, longrope and proportional"
        )
    settings.refuse_unread(harmless=_KEYS)
    return _rope(inv_freq, magnitude)


def local_from_hf(fields: Fields, *, head_dim: int, theta: float) -> Rope:
    """Read RoPE of the layers with a window, in families whose outer settings are for the others.

    Args:
        theta: base of these layers, unless their own settings have one.
    """
    if SLIDING in (fields.optional(dict, "rope_parameters") or {}):
        return from_hf(fields, head_dim=head_dim, layer_type=SLIDING, theta=theta)
    return plain(head_dim, theta)


def context_of_hf(fields: Fields, *, layer_type: str | None = None) -> int:
    """Return the context length for a model of a `config.json`, in tokens.

    LongRoPE has other frequencies for sequences beyond the original context. Keys in the KV cache
    would have been turned with the wrong ones, so the context ends there. Ministral 3 multiplies Q
    by `1 + beta * ln(1 + floor(position / original))`, which is 1 up to the original context, so
    its context ends there too.
    """
    context = fields.read(int, "max_position_embeddings")
    settings = hf_settings(fields, layer_type)
    beta = settings.optional(float, "llama_4_scaling_beta")
    if settings.read(str, "rope_type") in _LONGROPE or beta:
        return min(context, settings.read(int, "original_max_position_embeddings"))
    return context


def from_gguf(header: GGUFHeader, *, head_dim: int, truncate: bool = True) -> Rope:
    """Read RoPE from a GGUF file's `rope.*` keys and its tensors of factors.

    Args:
        truncate: see `scale_yarn`; files do not say it.
    """
    fields = header.fields
    dim = fields.optional(int, "rope.dimension_count") or head_dim
    theta = fields.positive("rope.freq_base", default=_THETA)
    inv_freq = base_frequencies(dim, theta)
    kind = _gguf_kind(fields)
    magnitude = 1.0
    if kind == "yarn":
        inv_freq, magnitude = _yarn_of_gguf(inv_freq, fields, theta, truncate=truncate)
    elif kind == "linear":
        # files without scaling may have a factor of 1 or 0; some write a factor and no type
        factor = fields.optional(float, "rope.scaling.factor")
        old = fields.optional(float, "rope.scale_linear")
        inv_freq = scale_linear(inv_freq, factor or old or 1.0)
    elif kind not in ("none", "longrope"):
        raise UnsupportedModelError(
            f"{fields.origin}: RoPE scaling {kind!r} is not supported; supported are none, "
            "linear, yarn and longrope"
        )
    for name in ("rope_freqs.weight", "rope_factors_short.weight"):
        factors = header.vector(name)
        if factors is not None:
            inv_freq = scale_by_factors(inv_freq, factors, name)
    fields.ignore("rope.scaling.factor", "rope.scaling.finetuned", "rope.scale_linear")
    fields.ignore("rope.scaling.original_context_length")
    attention_factor = fields.optional(float, "rope.scaling.attn_factor")
    if attention_factor is not None:
        magnitude *= _positive(attention_factor, "attn_factor")
    return _rope(inv_freq, magnitude)


def context_of_gguf(header: GGUFHeader) -> int:
    """Return the context length for a model of a GGUF file; see `context_of_hf`."""
    context = header.fields.read(int, "context_length")
    beta = header.fields.optional(float, "attention.temperature_scale")
    if "rope_factors_short.weight" in header.tensors or beta:
        return min(context, header.fields.read(int, "rope.scaling.original_context_length"))
    return context


def score_factor_of_hf(fields: Fields) -> float:
    """Return the factor of the scores that DeepSeek-V2's multiplier of YaRN asks for."""
    settings = hf_settings(fields)
    multiplier = settings.optional(float, "mscale_all_dim")
    if settings.read(str, "rope_type") == "default" or not multiplier:
        return 1.0
    return _yarn_magnitude(settings.read(float, "factor"), multiplier) ** 2


def score_factor_of_gguf(fields: Fields) -> float:
    """Return the same for a GGUF file of DeepSeek-V2, which has a tenth of the multiplier."""
    multiplier = fields.optional(float, "rope.scaling.yarn_log_multiplier")
    if not multiplier:
        return 1.0
    return _yarn_magnitude(fields.read(float, "rope.scaling.factor"), 10 * multiplier) ** 2


def _gguf_kind(fields: Fields) -> str:
    kind = fields.optional(str, "rope.scaling.type")
    # files without a type scale linearly if they have a factor, as in llama.cpp
    return "linear" if kind is None else kind


def _yarn_of_hf(inv_freq: Frequencies, settings: Fields, theta: float) -> tuple[Frequencies, float]:
    factor = _positive(settings.read(float, "factor"), "factor")
    truncate = settings.optional(bool, "truncate")
    magnitude = settings.optional(float, "attention_factor")
    mscale = settings.optional(float, "mscale")
    mscale_all_dim = settings.optional(float, "mscale_all_dim")
    if magnitude is None:
        magnitude = _yarn_magnitude(factor)
        if mscale and mscale_all_dim:
            magnitude = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
    scaled = scale_yarn(
        inv_freq,
        theta=theta,
        factor=factor,
        original=settings.read(int, "original_max_position_embeddings"),
        beta_fast=settings.optional(float, "beta_fast") or 32.0,
        beta_slow=settings.optional(float, "beta_slow") or 1.0,
        truncate=truncate is not False,
    )
    return scaled, magnitude


def _yarn_of_gguf(
    inv_freq: Frequencies, fields: Fields, theta: float, *, truncate: bool
) -> tuple[Frequencies, float]:
    fields.require("rope.scaling.yarn_ext_factor", 1.0)
    factor = _positive(fields.read(float, "rope.scaling.factor"), "factor")
    original = fields.optional(int, "rope.scaling.original_context_length")
    multiplier = fields.optional(float, "rope.scaling.yarn_log_multiplier")
    magnitude = fields.optional(float, "rope.scaling.yarn_attn_factor")
    if magnitude is None:
        magnitude = _yarn_magnitude(factor)
        if multiplier:
            magnitude /= _yarn_magnitude(factor, multiplier)
    scaled = scale_yarn(
        inv_freq,
        theta=theta,
        factor=factor,
        original=fields.read(int, "context_length") if original is None else original,
        beta_fast=fields.optional(float, "rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=fields.optional(float, "rope.scaling.yarn_beta_slow") or 1.0,
        truncate=truncate,
    )
    return scaled, magnitude


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the magnitude of YaRN (eq. 22 of the paper), with DeepSeek-V2's multiplier."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope_magnitude(settings: Fields, fields: Fields) -> float:
    attention_factor = settings.optional(float, "attention_factor")
    original = settings.read(int, "original_max_position_embeddings")
    factor = settings.optional(float, "factor")
    if attention_factor is not None:
        return attention_factor
    if original < 2:
        raise ModelFormatError(
            f"rope_scaling: original_max_position_embeddings is {original}; it must be above 1"
        )
    if factor is None:
        factor = fields.read(int, "max_position_embeddings") / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _rope(inv_freq: Frequencies, magnitude: float = 1.0) -> Rope:
    return Rope(inv_freq=tuple(inv_freq.tolist()), magnitude=float(magnitude))


def _positive(value: float, name: str) -> float:
    if value <= 0:
        raise ModelFormatError(f"rope_scaling: {name} is {value}; it must be positive")
    return value
