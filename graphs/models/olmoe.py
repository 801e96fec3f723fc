"""OLMoE: Llama with experts, one norm over all heads of Q and one over K's."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import Architecture, GGUFHeader, with_attention
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.require("clip_qkv")
    config = _normed(llama.config_from_hf(fields))
    normalized = fields.optional(bool, "norm_topk_prob") or False
    return with_experts(config, routing_from_hf(fields, normalized=normalized))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = _normed(llama.config_from_gguf(header))
    return experts_from_gguf(config, header, normalized=False)


def _normed(config: ModelConfig) -> ModelConfig:
    return with_attention(config, lambda _, a: replace(a, qk_norm="width"))


ARCHITECTURE = Architecture(config_from_hf=config_from_hf, config_from_gguf=config_from_gguf)
