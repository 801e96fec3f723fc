"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 with experts, in all layers or in some."""

from __future__ import annotations

from edgellm.graphs.architecture import Architecture, GGUFHeader, with_norms
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import (
    experts_from_gguf,
    routing_from_hf,
    sparse_layers,
    with_experts,
)
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama, qwen2


def config_from_hf(fields: Fields) -> ModelConfig:
    qwen2.without_windows(fields)
    config = with_norms(llama.config_from_hf(fields), layers="pre", queries="head")
    normalized = fields.optional(bool, "norm_topk_prob") or False
    return with_experts(
        config,
        routing_from_hf(fields, normalized=normalized),
        intermediate=fields.read(int, "moe_intermediate_size"),
        sparse=sparse_layers(fields, config.layer_count),
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = with_norms(llama.config_from_gguf(header), layers="pre", queries="head")
    return experts_from_gguf(config, header, normalized=True)


ARCHITECTURE = Architecture(config_from_hf=config_from_hf, config_from_gguf=config_from_gguf)
