"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, one of which all tokens go through."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import HF_NAMES, Architecture, GGUFHeader, with_attention
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import (
    experts_from_gguf,
    routing_from_hf,
    sparse_layers,
    with_experts,
)
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import SharedExpert
from edgellm.graphs.models import llama, qwen2
from edgellm.graphs.tensor import Tensor, as_vector

_SHARED = "model.layers.{}.mlp.shared_expert"


def config_from_hf(fields: Fields) -> ModelConfig:
    qwen2.without_windows(fields)
    config = llama.config_from_hf(fields)
    bias = fields.optional(bool, "qkv_bias") is not False
    normalized = fields.optional(bool, "norm_topk_prob") or False
    return with_experts(
        with_attention(config, lambda _, a: replace(a, qkv_bias=bias)),
        routing_from_hf(fields, normalized=normalized),
        intermediate=fields.read(int, "moe_intermediate_size"),
        shared=SharedExpert(
            intermediate=fields.read(int, "shared_expert_intermediate_size"), routed=True
        ),
        sparse=sparse_layers(fields, config.layer_count),
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    return experts_from_gguf(llama.config_from_gguf(header), header, normalized=False)


def _fold_hf(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    return as_vector(tensor) if name.endswith("shared_router") else tensor


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **HF_NAMES,
        "shared_router": f"{_SHARED}_gate.weight",
        **{f"shared_{x}": f"{_SHARED}.{x}_proj.weight" for x in ("gate", "up", "down")},
    },
    hf_fold=_fold_hf,
)
