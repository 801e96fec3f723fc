"""GLM-4.7-Flash: attention over latents; a dense layer, then experts chosen by their sigmoids.

A layer that predicts further tokens comes behind the model's own, and is not read.
"""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import deepseek_v3


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"first_k_dense_replace": 1})
    fields.ignore("partial_rotary_factor")
    count = fields.read(int, "num_hidden_layers")
    kinds = fields.entries(str, "mlp_layer_types", count)
    sparse = None if kinds is None else [kind == "sparse" for kind in kinds]
    return deepseek_v3.latents_and_experts(fields, sparse=sparse)


ARCHITECTURE = replace(deepseek_v3.ARCHITECTURE, config_from_hf=config_from_hf)
