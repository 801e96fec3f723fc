"""Gemma 2: norms on both sides, windows in every other layer, soft caps of scores and logits."""

from __future__ import annotations

import math
from dataclasses import replace

from edgellm.graphs.architecture import (
    HF_SANDWICH_NAMES,
    Architecture,
    GGUFHeader,
    with_attention,
    with_layers,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import sliding_of_gguf, sliding_of_hf, with_windows
from edgellm.graphs.models import gemma

_PERIOD = 2
_WINDOW = 4096
# Layers of the 27B model, whose scores are not scaled by head_dim; its GGUF file has no key for it.
_LAYERS_27B = 46


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume(
        {
            "query_pre_attn_scalar": 256,
            "sliding_window": _WINDOW,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    )
    config = gemma.config_from_hf(fields)
    sliding = sliding_of_hf(fields, config.layer_count, period=_PERIOD)
    config = with_windows(config, sliding, fields.optional(int, "sliding_window"))
    return capped(
        config,
        scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        scores=fields.optional(float, "attn_logit_softcapping"),
        logits=fields.optional(float, "final_logit_softcapping"),
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    fields = header.fields
    config = gemma.config_from_gguf(header)
    sliding = sliding_of_gguf(fields, config.layer_count, period=_PERIOD)
    config = with_windows(config, sliding, config.attention.window or _WINDOW)
    scores = fields.optional(float, "attn_logit_softcapping")
    logits = fields.optional(float, "final_logit_softcapping")
    return capped(
        config,
        scale=gguf_scale(config, layers_27b=_LAYERS_27B),
        # a file without caps has those of llama.cpp
        scores=50.0 if scores is None else scores,
        logits=30.0 if logits is None else logits,
    )


def capped(
    config: ModelConfig, *, scale: float, scores: float | None, logits: float | None
) -> ModelConfig:
    """Return the config with norms on both sides, a scale of scores, and soft caps.

    Args:
        scale: factor of the attention scores.
        scores, logits: soft caps of scores and logits; None or 0: no cap.
    """
    config = with_attention(config, lambda _, a: replace(a, scale=scale, softcap=scores or None))
    config = with_layers(config, lambda _, layer: replace(layer, norms="sandwich"))
    return replace(config, logit_softcap=logits or None)


def gguf_scale(config: ModelConfig, *, layers_27b: int) -> float:
    """Return the scale of attention scores for a GGUF file's model.

    The 27B models, known by their number of layers, have another scale than the others.
    """
    whole = config.layer_count == layers_27b
    return math.sqrt(1 / (config.hidden_size // config.heads if whole else config.head_dim))


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=HF_SANDWICH_NAMES,
    hf_fold=gemma.fold,
)
