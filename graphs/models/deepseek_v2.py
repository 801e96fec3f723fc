"""DeepSeek-V2 and V2-Lite: attention over latents; a dense layer, then experts and shared ones.

GGUF files of all models with this attention have one architecture, those of GLM-4.7-Flash too.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs import latents
from edgellm.graphs.architecture import Architecture, GGUFHeader
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import SharedExpert


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"first_k_dense_replace": 0, "topk_method": "greedy"})
    for key, value in (
        ("norm_topk_prob", False),
        ("scoring_func", "softmax"),
        ("moe_layer_freq", 1),
    ):
        fields.require(key, value)
    fields.require("topk_method", "greedy", "group_limited_greedy")
    fields.ignore("aux_loss_alpha")
    config = latents.config_from_hf(fields)
    experts = routing_from_hf(fields, normalized=False)
    groups, used = (fields.optional(int, key) or 1 for key in ("n_group", "topk_group"))
    if fields.read(str, "topk_method") == "group_limited_greedy":
        experts = replace(experts, groups=groups, used_groups=used)
    size, dense = (
        fields.read(int, "moe_intermediate_size"),
        fields.read(int, "first_k_dense_replace"),
    )
    return with_experts(
        config,
        replace(experts, scale=fields.positive("routed_scaling_factor", default=1.0)),
        intermediate=size,
        shared=SharedExpert(intermediate=fields.read(int, "n_shared_experts") * size),
        sparse=[index >= dense for index in range(config.layer_count)],
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = latents.config_from_gguf(header)
    own = config.layer_count - (header.fields.optional(int, "nextn_predict_layers") or 0)
    config = replace(config, layers=config.layers[:own])
    # only routers of sigmoids have this bias, and older files do not name the scores
    sigmoid = f"blk.{own - 1}.exp_probs_b.bias" in header.tensors
    return experts_from_gguf(
        config,
        header,
        normalized=sigmoid,
        scores="sigmoid" if sigmoid else "softmax",
        selection_bias=sigmoid,
    )


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=latents.HF_LATENT_NAMES,
    gguf_names=latents.GGUF_LATENT_NAMES,
    hf_interleaved_rope=True,
    gguf_interleaved_rope=True,
)
