"""Qwen3.5 and Qwen3.6 with experts, one of which all tokens go through (35B-A3B)."""

from __future__ import annotations

from edgellm.graphs.architecture import Architecture, GGUFHeader
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import SharedExpert
from edgellm.graphs.models import qwen2_moe, qwen3_5_text
from edgellm.graphs.tensor import Tensor, as_vector

_DEFAULTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume(_DEFAULTS)
    return with_experts(
        qwen3_5_text.config_from_hf(fields, intermediate="moe_intermediate_size"),
        routing_from_hf(fields, normalized=True),
        shared=SharedExpert(
            intermediate=fields.read(int, "shared_expert_intermediate_size"), routed=True
        ),
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    return experts_from_gguf(qwen3_5_text.config_from_gguf(header), header, normalized=True)


def _fold_hf(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    if name.endswith("shared_router"):
        return as_vector(tensor)
    return qwen3_5_text.fold_hf(name, tensor, fields)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **qwen3_5_text.ARCHITECTURE.hf_names,
        **{k: v for k, v in qwen2_moe.ARCHITECTURE.hf_names.items() if k.startswith("shared_")},
    },
    gguf_names=qwen3_5_text.ARCHITECTURE.gguf_names,
    hf_fold=_fold_hf,
    mtp=True,
)
