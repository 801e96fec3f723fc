"""LFM2-8B-A1B and LFM2-24B-A2B: LFM2 with experts behind the first layers."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import Architecture, GGUFHeader, PerExpert
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import lfm2

_MLP = "model.layers.{}.feed_forward."


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"block_auto_adjust_ff_dim": False})
    config = lfm2.config_from_hf(fields)
    experts = routing_from_hf(
        fields, normalized=fields.optional(bool, "norm_topk_prob") is not False
    )
    dense = fields.optional(int, "num_dense_layers")
    dense = 2 if dense is None else dense
    return with_experts(
        config,
        replace(
            experts,
            scores="sigmoid",
            selection_bias=fields.optional(bool, "use_expert_bias") is not False,
            scale=fields.positive("routed_scaling_factor", default=1.0),
        ),
        intermediate=fields.read(int, "moe_intermediate_size"),
        sparse=[index >= dense for index in range(config.layer_count)],
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = lfm2.config_from_gguf(header)
    biased = f"blk.{config.layer_count - 1}.exp_probs_b.bias" in header.tensors
    return experts_from_gguf(
        config, header, normalized=True, scores="sigmoid", selection_bias=biased
    )


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **lfm2.ARCHITECTURE.hf_names,
        "router": f"{_MLP}gate.weight",
        "selection_bias": f"{_MLP}expert_bias",
        "expert_gate": PerExpert(f"{_MLP}experts.{{}}.w1.weight"),
        "expert_up": PerExpert(f"{_MLP}experts.{{}}.w3.weight"),
        "expert_down": PerExpert(f"{_MLP}experts.{{}}.w2.weight"),
    },
    gguf_names=lfm2.ARCHITECTURE.gguf_names,
    hf_fold=lfm2.fold_hf,
)
