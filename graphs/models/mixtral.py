"""Mixtral: Mistral with experts under other names. (Its GGUF files say `llama`.)"""

from __future__ import annotations

from edgellm.graphs.architecture import HF_NAMES, Architecture, PerExpert
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import mistral

_EXPERT = "model.layers.{}.block_sparse_moe.experts.{}."


def config_from_hf(fields: Fields) -> ModelConfig:
    config = mistral.config_from_hf(fields)
    return with_experts(config, routing_from_hf(fields, normalized=True))


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    hf_names={
        **HF_NAMES,
        "router": "model.layers.{}.block_sparse_moe.gate.weight",
        "expert_gate": PerExpert(f"{_EXPERT}w1.weight"),
        "expert_up": PerExpert(f"{_EXPERT}w3.weight"),
        "expert_down": PerExpert(f"{_EXPERT}w2.weight"),
    },
)
