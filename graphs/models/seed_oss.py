"""Seed-OSS: Llama with biases of Q, K and V, and optionally of the output projection."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import GGUF_NAMES, Architecture, with_attention
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"attention_bias": True, "attention_out_bias": False, "head_dim": 128})
    config = llama.config_from_hf(fields)
    output_bias = fields.read(bool, "attention_out_bias")
    return with_attention(config, lambda _, a: replace(a, output_bias=output_bias))


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=llama.config_from_gguf,
    gguf_names={**GGUF_NAMES, "mlp_norm": "blk.{}.post_attention_norm.weight"},
)
