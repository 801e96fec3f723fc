"""Qwen2 and Qwen2.5: Llama with a bias in Q, K and V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgellm.graphs.config import Fields, ModelConfig
from edgellm.graphs.models import llama

HF_TENSORS = {
    **llama.HF_TENSORS,
    "layers.q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers.k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers.v_bias": "model.layers.{}.self_attn.v_proj.bias",
}

GGUF_TENSORS = {
    **llama.GGUF_TENSORS,
    "layers.q_bias": "blk.{}.attn_q.bias",
    "layers.k_bias": "blk.{}.attn_k.bias",
    "layers.v_bias": "blk.{}.attn_v.bias",
}

GGUF_INTERLEAVED_ROPE = False


def config_from_hf(values: Mapping[str, Any], *, origin: str) -> ModelConfig:
    Fields(values, origin=origin).require("use_sliding_window", False)
    return replace(llama.config_from_hf(values, origin=origin), qkv_bias=True)


def config_from_gguf(metadata: Mapping[str, Any], **found: Any) -> ModelConfig:
    """As Llama's, under keys that begin with `qwen2.`."""
    renamed = {
        key.replace("qwen2.", "llama.", 1) if key.startswith("qwen2.") else key: value
        for key, value in metadata.items()
    }
    config = llama.config_from_gguf(renamed, **found)
    return replace(config, model_type="qwen2", qkv_bias=True)
