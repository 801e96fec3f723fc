"""Qwen2 and Qwen2.5: Llama with a bias in Q, K and V."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import Architecture, with_attention
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama


def config_from_hf(fields: Fields) -> ModelConfig:
    without_windows(fields)
    config = llama.config_from_hf(fields)
    return with_attention(config, lambda _, a: replace(a, qkv_bias=True))


def without_windows(fields: Fields) -> None:
    """Refuse sliding windows, which no released model of these families has."""
    fields.require("use_sliding_window", False)
    # length and layers of the window that is not used
    fields.ignore("sliding_window", "max_window_layers", "layer_types")


ARCHITECTURE = Architecture(config_from_hf=config_from_hf, config_from_gguf=llama.config_from_gguf)
