"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, LongRoPE, part of a head rotated."""

from __future__ import annotations

from edgellm.graphs.architecture import (
    GGUF_FUSED_MLP,
    GGUF_NAMES,
    HF_FUSED_MLP,
    HF_FUSED_QKV,
    HF_NAMES,
    Architecture,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama, mistral


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"original_max_position_embeddings": 4096})
    fields.require("lm_head_bias", False)
    fields.require("full_attn_mod", 1)
    fields.ignore("interpolate_factor")
    return mistral.config_from_hf(fields, partial=True)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=llama.config_from_gguf,
    hf_names={**HF_NAMES, **HF_FUSED_QKV, **HF_FUSED_MLP},
    gguf_names={**GGUF_NAMES, **GGUF_FUSED_MLP},
)
