"""GLM-4.5 and 4.6 (Air and whole): dense layers, then experts chosen by their sigmoids.

Layers that predict further tokens come behind the model's own, and are not read.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import (
    GGUF_NAMES,
    Architecture,
    GGUFHeader,
    with_attention,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, sigmoids_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import SharedExpert
from edgellm.graphs.models import llama


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"partial_rotary_factor": 0.5, "first_k_dense_replace": 1})
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    config = llama.config_from_hf(fields, partial=True)
    norms = fields.optional(bool, "use_qk_norm") or False
    size = fields.read(int, "moe_intermediate_size")
    dense = fields.read(int, "first_k_dense_replace")
    shared = fields.optional(int, "n_shared_experts")
    return with_experts(
        _normed(with_attention(config, lambda _, a: replace(a, output_bias=False)), norms),
        sigmoids_from_hf(fields),
        intermediate=size,
        shared=SharedExpert(intermediate=shared * size) if shared else None,
        sparse=[index >= dense for index in range(config.layer_count)],
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    fields = header.fields
    # files of multimodal models have the rows of Q and K in another order
    fields.require("rope.dimension_sections")
    config = llama.config_from_gguf(header)
    own = config.layer_count - (fields.optional(int, "nextn_predict_layers") or 0)
    config = replace(config, layers=config.layers[:own])
    norms = "blk.0.attn_q_norm.weight" in header.tensors
    return experts_from_gguf(
        _normed(config, norms), header, normalized=True, scores="sigmoid", selection_bias=True
    )


def _normed(config: ModelConfig, norms: bool) -> ModelConfig:
    return with_attention(config, lambda _, a: replace(a, qk_norm="head" if norms else "none"))


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    gguf_names={**GGUF_NAMES, "mlp_norm": "blk.{}.post_attention_norm.weight"},
)
