"""DeepSeek-V3, R1 and Moonlight: attention over latents; experts of groups, by their sigmoids.

A layer that predicts further tokens comes behind the model's own, and is not read.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.graphs import latents
from edgellm.graphs.architecture import Architecture
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import sigmoids_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import SharedExpert


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume(
        {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    )
    return latents_and_experts(fields)


def latents_and_experts(fields: Fields, *, sparse: Sequence[bool] | None = None) -> ModelConfig:
    """Read a `config.json`.

    Args:
        sparse: for each layer, whether it has experts; None: all behind the first ones.
    """
    for key, value in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        fields.require(key, value)
    fields.ignore("aux_loss_alpha", "num_nextn_predict_layers", "num_mtp_layers")
    config = latents.config_from_hf(fields)
    size, dense = (
        fields.read(int, "moe_intermediate_size"),
        fields.read(int, "first_k_dense_replace"),
    )
    return with_experts(
        config,
        sigmoids_from_hf(fields),
        intermediate=size,
        shared=SharedExpert(intermediate=fields.read(int, "n_shared_experts") * size),
        sparse=sparse or [index >= dense for index in range(config.layer_count)],
    )


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    hf_names=latents.HF_LATENT_NAMES,
    hf_interleaved_rope=True,
)
