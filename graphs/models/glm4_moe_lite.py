"""GLM-4.7-Flash: attention over latents; a dense layer, then experts chosen by their sigmoids.

A layer that predicts further tokens comes behind the model's own, and is not read.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs import latents
from edgellm.graphs.architecture import Architecture
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import SharedExpert


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"first_k_dense_replace": 1})
    for key, value in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        fields.require(key, value)
    fields.ignore("aux_loss_alpha", "num_nextn_predict_layers", "partial_rotary_factor")
    config = latents.config_from_hf(fields)
    experts = routing_from_hf(
        fields, normalized=fields.optional(bool, "norm_topk_prob") is not False
    )
    size, dense = (
        fields.read(int, "moe_intermediate_size"),
        fields.read(int, "first_k_dense_replace"),
    )
    kinds = fields.entries(str, "mlp_layer_types", config.layer_count)
    return with_experts(
        config,
        replace(
            experts,
            scores="sigmoid",
            selection_bias=True,
            scale=fields.positive("routed_scaling_factor", default=1.0),
            groups=fields.optional(int, "n_group") or 1,
            used_groups=fields.optional(int, "topk_group") or 1,
        ),
        intermediate=size,
        shared=SharedExpert(intermediate=fields.read(int, "n_shared_experts") * size),
        sparse=[
            index >= dense if kinds is None else kinds[index] == "sparse"
            for index in range(config.layer_count)
        ],
    )


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    hf_names=latents.HF_LATENT_NAMES,
    hf_interleaved_rope=True,
)
