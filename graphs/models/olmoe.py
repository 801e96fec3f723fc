"""OLMoE: Llama with experts, one norm over all heads of Q and one over K's."""

from __future__ import annotations

from edgellm.graphs.architecture import Architecture, GGUFHeader, with_norms
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.require("clip_qkv")
    config = with_norms(llama.config_from_hf(fields), layers="pre", queries="width")
    normalized = fields.optional(bool, "norm_topk_prob") or False
    return with_experts(config, routing_from_hf(fields, normalized=normalized))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = with_norms(llama.config_from_gguf(header), layers="pre", queries="width")
    return experts_from_gguf(config, header, normalized=False)


ARCHITECTURE = Architecture(config_from_hf=config_from_hf, config_from_gguf=config_from_gguf)
