"""Qwen3: Llama with RMS norms of each head of Q and K."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import Architecture, GGUFHeader, with_attention
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama, qwen2


def config_from_hf(fields: Fields) -> ModelConfig:
    qwen2.without_windows(fields)
    fields.assume({"head_dim": 128})
    return normed(llama.config_from_hf(fields))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    return normed(llama.config_from_gguf(header))


def normed(config: ModelConfig) -> ModelConfig:
    return with_attention(config, lambda _, a: replace(a, qk_norm="head"))


ARCHITECTURE = Architecture(config_from_hf=config_from_hf, config_from_gguf=config_from_gguf)
