"""Granite 3 MoE: Granite with experts, whose matrices are stacked, and gate and up fused."""

from __future__ import annotations

from edgellm.graphs.architecture import HF_NAMES, Architecture, Fused, GGUFHeader, Names
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import granite

_EXPERTS = "model.layers.{}.block_sparse_moe."
_GATE_UP = Fused(f"{_EXPERTS}input_linear.weight", ("gate", "up"))


def config_from_hf(fields: Fields) -> ModelConfig:
    config = granite.config_from_hf(fields)
    return with_experts(config, routing_from_hf(fields, normalized=True))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    return experts_from_gguf(granite.config_from_gguf(header), header, normalized=True)


HF_EXPERT_NAMES: Names = {
    "router": f"{_EXPERTS}router.layer.weight",
    "expert_gate": _GATE_UP,
    "expert_up": _GATE_UP,
    "expert_down": f"{_EXPERTS}output_linear.weight",
}

ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={**HF_NAMES, **HF_EXPERT_NAMES},
    gguf_interleaved_rope=True,
    hf_fold=granite.fold_hf,
    gguf_fold=granite.fold_gguf,
)
