"""Falcon-H1: attention and Mamba-2 side by side in each layer, and multipliers of many products."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from edgellm.errors import ModelFormatError
from edgellm.graphs.architecture import (
    GGUF_NAMES,
    HF_NAMES,
    Architecture,
    GGUFHeader,
    with_layers,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import granitemoehybrid, llama
from edgellm.graphs.state_mixers import Mamba2
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.translation import with_values

_LAYER = "model.layers.{}."
_DEFAULTS = {
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
}
# Tensor -> keys of its factors.
_FACTORS = {
    "q": ("attention_in_multiplier",),
    "k": ("attention_in_multiplier", "key_multiplier"),
    "v": ("attention_in_multiplier",),
    "o": ("attention_out_multiplier",),
    "mamba_o": ("ssm_out_multiplier",),
    "final_norm": ("lm_head_multiplier",),  # the logits are linear in it
}
_MLP, _MAMBA = "mlp_multipliers", "ssm_multipliers"
_MAMBA_IN = "ssm_in_multiplier"
_LISTS = {_MLP: 2, _MAMBA: 5}
_NUMBERS = {*sum(_FACTORS.values(), ()), _MAMBA_IN, "embedding_multiplier"}
# Set where the config is read: an adapter's fold, which has no config, must not take them.
_ONES = {**dict.fromkeys(_NUMBERS, 1.0), **{key: [1.0] * n for key, n in _LISTS.items()}}


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume(_DEFAULTS | _ONES)
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        fields.require(key, False)
    # transformers writes the infinite number as a dictionary
    fields.require("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    # speed alone; there is always an MLP
    fields.ignore("mamba_chunk_size", "mamba_use_mlp", "num_logits_to_keep")
    for key in _NUMBERS:
        fields.positive(key)
    for key in _LISTS:
        _multipliers(fields, key)
    config = llama.config_from_hf(fields)
    inner = fields.optional(int, "mamba_d_ssm")
    if inner is None:
        inner = config.hidden_size * fields.read(int, "mamba_expand")
    fields.ignore("mamba_expand")  # of models that do not say their width
    mamba = granitemoehybrid.hf_mixer(fields, inner)
    normed = fields.read(bool, "mamba_rms_norm")
    if normed:
        fields.require("mamba_norm_before_gate", False)
    fields.ignore("mamba_norm_before_gate")
    scale = fields.positive("embedding_multiplier")
    return replace(_both(config, replace(mamba, gate_norm=normed)), embedding_scale=scale)


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the keys of a GGUF file, whose tensors have been multiplied."""
    mamba = granitemoehybrid.gguf_mixer(header.fields)
    normed = "blk.0.ssm_norm.weight" in header.tensors
    bias = "blk.0.ssm_conv1d.bias" in header.tensors
    config = llama.config_from_gguf(header)
    return _both(config, replace(mamba, gate_norm=normed, conv_bias=bias))


def _both(config: ModelConfig, mamba: Mamba2) -> ModelConfig:
    return with_layers(config, lambda _, layer: replace(layer, beside=mamba))


def _multipliers(fields: Fields, key: str) -> list[float]:
    """Read a list of factors."""
    count = _LISTS[key]
    values = fields.read(list, key)
    if len(values) != count or not all(
        isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in values
    ):
        raise ModelFormatError(
            f"{fields.origin}: key {key!r} is {values!r:.200}; {count} numbers above 0 are allowed"
        )
    return [float(x) for x in values]


def _fold_hf(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    part = name.rpartition(".")[2]
    factor: float | np.ndarray = 1.0
    if part in _FACTORS:
        factor = math.prod(fields.positive(key) for key in _FACTORS[part])
    elif part in ("gate", "down"):
        factor = _multipliers(fields, _MLP)[part == "down"]
    elif part == "mamba_in":
        factor = fields.positive(_MAMBA_IN) * _of_rows(fields, tensor.shape[0])
    else:
        return granitemoehybrid.mamba_of_hf(name, tensor)
    if np.all(factor == 1):
        return tensor
    return with_values(tensor, lambda values: (values * factor).astype(np.float32))


def _of_rows(fields: Fields, rows: int) -> np.ndarray:
    """Return the factors of z, x, B, C and dt for each row of their projection, `[rows, 1]`."""
    shared = fields.read(int, "mamba_n_groups") * fields.read(int, "mamba_d_state")
    heads = fields.read(int, "mamba_n_heads")
    inner = (rows - 2 * shared - heads) // 2
    counts = inner, inner, shared, shared, rows - 2 * inner - 2 * shared
    return np.repeat(_multipliers(fields, _MAMBA), counts)[:, None]


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **granitemoehybrid.ARCHITECTURE.hf_names,
        **{x: HF_NAMES[x] for x in ("attention_norm", "o")},
        **{x: f"{_LAYER}feed_forward.{x}_proj.weight" for x in ("gate", "up", "down")},
        "final_norm": "model.final_layernorm.weight",
        "mlp_norm": f"{_LAYER}pre_ff_layernorm.weight",
        "mamba_o": f"{_LAYER}mamba.out_proj.weight",
    },
    gguf_names={
        **granitemoehybrid.ARCHITECTURE.gguf_names,
        "mlp_norm": "blk.{}.ffn_norm",
        "mamba_o": "blk.{}.ssm_out.weight",
        "o": GGUF_NAMES["o"],
    },
    hf_fold=_fold_hf,
    gguf_fold=lambda name, tensor, _: granitemoehybrid.mamba_of_gguf(name, tensor),
)
