"""GLM-4-0414: norms on both sides, half of a head rotated in pairs of neighbours."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import (
    GGUF_FUSED_MLP,
    GGUF_NAMES,
    HF_FUSED_MLP,
    HF_NAMES,
    Architecture,
    GGUFHeader,
    with_attention,
    with_norms,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5})
    config = llama.config_from_hf(fields, partial=True)
    config = with_attention(config, lambda _, a: replace(a, output_bias=False))
    return with_norms(config, layers="sandwich", queries="none")


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    # files of multimodal models have the rows of Q and K in another order
    header.fields.require("rope.dimension_sections")
    header.fields.require("nextn_predict_layers", 0)
    return with_norms(llama.config_from_gguf(header), layers="sandwich", queries="none")


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **HF_NAMES,
        **HF_FUSED_MLP,
        "post_attention_norm": "model.layers.{}.post_self_attn_layernorm.weight",
        "post_mlp_norm": "model.layers.{}.post_mlp_layernorm.weight",
    },
    gguf_names={**GGUF_NAMES, **GGUF_FUSED_MLP},
    hf_interleaved_rope=True,
    gguf_interleaved_rope=True,
)
