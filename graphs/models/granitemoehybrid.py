"""Granite 4 with attention in all layers and no experts. (Its GGUF files say `granite`.)"""

from __future__ import annotations

from dataclasses import replace

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.architecture import HF_NAMES, Architecture, Fused
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import granite
from edgellm.graphs.rope_scaling import no_rotation

_GATE_UP = Fused("model.layers.{}.shared_mlp.input_linear.weight", ("gate", "up"))
# Keys of recurrent layers and experts; models that have these parts are refused.
_UNUSED = (
    "intermediate_size", "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head",
    "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias",
    "num_experts_per_tok",
)  # fmt: skip


def config_from_hf(fields: Fields) -> ModelConfig:
    if "num_local_experts" not in fields or fields.read(int, "num_local_experts") != 0:
        raise UnsupportedModelError(
            f"{fields.origin}: num_local_experts is not 0: experts of this family are not "
            "supported (those of granitemoe are)"
        )
    fields.require("normalization_function", "rmsnorm")
    fields.require("position_embedding_type", "rope", "nope")
    fields.ignore(*_UNUSED)
    count = fields.read(int, "num_hidden_layers")
    for layer_type in fields.entries(str, "layer_types", count) or ["mamba"]:
        if layer_type not in ("attention", "full_attention"):
            raise UnsupportedModelError(
                f"{fields.origin}: layer_types has {layer_type!r}; supported is attention"
            )
    config = granite.config_from_hf(fields, intermediate="shared_intermediate_size")
    if fields.optional(str, "position_embedding_type") != "rope":
        config = replace(config, ropes=(no_rotation(config.ropes[0]),))
    return config


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    hf_names={
        **HF_NAMES,
        "gate": _GATE_UP,
        "up": _GATE_UP,
        "down": "model.layers.{}.shared_mlp.output_linear.weight",
    },
    hf_fold=granite.fold_hf,
)
