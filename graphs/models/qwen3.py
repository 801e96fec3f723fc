"""Qwen3: Llama with RMS norms of each head of Q and K."""

from __future__ import annotations

from edgellm.graphs.architecture import Architecture, GGUFHeader, with_norms
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama, qwen2


def config_from_hf(fields: Fields) -> ModelConfig:
    qwen2.without_windows(fields)
    fields.assume({"head_dim": 128})
    return with_norms(llama.config_from_hf(fields), layers="pre", queries="head")


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    return with_norms(llama.config_from_gguf(header), layers="pre", queries="head")


ARCHITECTURE = Architecture(config_from_hf=config_from_hf, config_from_gguf=config_from_gguf)
