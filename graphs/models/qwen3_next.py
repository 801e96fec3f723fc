"""Qwen3-Next (80B-A3B): Qwen3.5 with experts, its delta nets' projections fused by key heads."""

from __future__ import annotations

from edgellm.graphs.architecture import Architecture, Fused, GGUFHeader
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import (
    experts_from_gguf,
    routing_from_hf,
    sparse_layers,
    with_experts,
)
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import SharedExpert
from edgellm.graphs.models import qwen2, qwen3_5_moe_text, qwen3_5_text

_DEFAULTS = {
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512,
}
_QKVZ = "model.layers.{}.linear_attn.in_proj_qkvz.weight"
_BETA_ALPHA = ("delta_b", "delta_a")


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume(_DEFAULTS)
    qwen2.without_windows(fields)
    config = qwen3_5_text.config_from_hf(fields)
    return with_experts(
        config,
        routing_from_hf(fields, normalized=fields.read(bool, "norm_topk_prob")),
        intermediate=fields.read(int, "moe_intermediate_size"),
        shared=SharedExpert(
            intermediate=fields.read(int, "shared_expert_intermediate_size"), routed=True
        ),
        sparse=sparse_layers(fields, config.layer_count),
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = qwen3_5_text.config_from_gguf(header, tiled=False)
    return experts_from_gguf(config, header, normalized=True)


def _fused(name: str) -> dict[str, Fused]:
    return {part: Fused(name, _BETA_ALPHA, by_heads=True) for part in _BETA_ALPHA}


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **qwen3_5_moe_text.ARCHITECTURE.hf_names,
        **{
            f"delta_{x}": Fused(_QKVZ, ("delta_qkv", "delta_z"), by_heads=True)
            for x in ("qkv", "z")
        },
        **_fused("model.layers.{}.linear_attn.in_proj_ba.weight"),
    },
    gguf_names={
        **qwen3_5_moe_text.ARCHITECTURE.gguf_names,
        **_fused("blk.{}.ssm_ba.weight"),
    },
    hf_fold=qwen3_5_moe_text.ARCHITECTURE.hf_fold,
    mtp=True,
)
