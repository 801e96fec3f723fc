"""Granite 4: Mamba-2 in most layers, attention without RoPE in the others; some have experts.

GGUF files of models with attention in all layers say `granite`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.architecture import GGUF_NAMES, HF_NAMES, Architecture, Fused, GGUFHeader
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import SharedExpert
from edgellm.graphs.layer_kinds import FULL, attending_of_gguf, mixers_of_hf, with_mixers
from edgellm.graphs.models import granite, granitemoe
from edgellm.graphs.rope_scaling import no_rotation
from edgellm.graphs.state_mixers import Mamba2
from edgellm.graphs.tensor import Tensor, reshaped
from edgellm.graphs.translation import with_values

_MIXER = "model.layers.{}.mamba."
# The MLP, which is the shared expert of models with experts.
_GATE_UP = "model.layers.{}.shared_mlp.input_linear.weight"
_DOWN = "model.layers.{}.shared_mlp.output_linear.weight"
# Sizes of experts, which models without them have too, and of chunks, which change the speed alone.
_UNUSED = ("intermediate_size", "mamba_chunk_size", "num_experts_per_tok")
_DEFAULTS = {
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
# Types of layers; models came with the first names, and transformers writes the second ones.
_ATTENDS, _MAMBA = ("attention", FULL), ("mamba", "linear_attention")


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.require("normalization_function", "rmsnorm")
    fields.require("position_embedding_type", "rope", "nope")
    fields.require("mamba_proj_bias", False)
    # transformers writes the infinite number as a dictionary
    fields.require("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    # models with attention in all layers have the keys of Mamba-2 as well
    fields.ignore(*_UNUSED, *_DEFAULTS, "mamba_conv_bias")
    fields.assume(_DEFAULTS)
    config = granite.config_from_hf(fields, intermediate="shared_intermediate_size")
    types = mixers_of_hf(fields, config.layer_count, others=(_ATTENDS[0], *_MAMBA))
    types = types or [_MAMBA[0]] * config.layer_count
    inner = config.hidden_size * fields.read(int, "mamba_expand")
    mamba = hf_mixer(fields, inner) if set(types) & set(_MAMBA) else None
    if fields.optional(str, "position_embedding_type") != "rope":
        config = replace(config, ropes=(no_rotation(config.ropes[0]),))
    config = with_mixers(config, [mamba if each in _MAMBA else None for each in types])
    if not fields.read(int, "num_local_experts"):
        return config
    # the MLP is beside the experts then
    return with_experts(
        config,
        routing_from_hf(fields, normalized=True),
        intermediate=fields.read(int, "intermediate_size"),
        shared=SharedExpert(intermediate=config.layers[0].mlp.intermediate),
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    fields = header.fields
    if fields.optional(bool, "rope.scaling.finetuned") is not False:
        raise UnsupportedModelError(
            f"{fields.origin}: its layers with attention have RoPE, as those of Bamba; supported "
            "are Granite 4 models"
        )
    config = granite.config_from_gguf(header, hybrid=True)
    mamba = gguf_mixer(fields)
    attends = attending_of_gguf(fields, config.layer_count)
    config = with_mixers(config, [None if each else mamba for each in attends])
    if not fields.optional(int, "expert_count"):
        return config
    return experts_from_gguf(config, header, normalized=True)


def gguf_mixer(fields: Fields) -> Mamba2:
    """Read the Mamba-2 of a GGUF file."""
    inner, heads = fields.read(int, "ssm.inner_size"), fields.read(int, "ssm.time_step_rank")
    return Mamba2(
        heads=heads,
        head_dim=_share(fields, inner, heads),
        state_dim=fields.read(int, "ssm.state_size"),
        groups=fields.read(int, "ssm.group_count"),
        taps=fields.read(int, "ssm.conv_kernel"),
        norm_eps=fields.read(float, "attention.layer_norm_rms_epsilon"),
    )


def hf_mixer(fields: Fields, inner: int) -> Mamba2:
    """Read the Mamba-2 of a `config.json`.

    Args:
        inner: channels of all heads together.
    """
    heads = fields.read(int, "mamba_n_heads")
    head_dim = _share(fields, inner, heads)
    fields.require("mamba_d_head", "auto", head_dim)
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        state_dim=fields.read(int, "mamba_d_state"),
        groups=fields.read(int, "mamba_n_groups"),
        taps=fields.read(int, "mamba_d_conv"),
        norm_eps=fields.read(float, "rms_norm_eps"),
        conv_bias=fields.optional(bool, "mamba_conv_bias") is not False,
    )


def _share(fields: Fields, inner: int, heads: int) -> int:
    """Return the channels of a head."""
    if heads < 1 or inner % heads:
        raise ModelFormatError(
            f"{fields.origin}: {inner} channels of Mamba-2 for {heads} heads; a whole number for "
            "each is needed"
        )
    return inner // heads


def fold_hf(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    return granite.fold_hf(name, mamba_of_hf(name, tensor), fields)


def mamba_of_hf(name: str, tensor: Tensor) -> Tensor:
    """Take dimensions of size 1 away, and the decay out of its logarithm."""
    part = name.rpartition(".")[2]
    if part == "conv" and len(tensor.shape) == 3 and tensor.shape[1] == 1:
        return reshaped(tensor, tensor.shape[0], tensor.shape[2])
    if part == "decay":
        return with_values(tensor, lambda values: -np.exp(values))
    return tensor


def fold_gguf(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    return granite.fold_gguf(name, mamba_of_gguf(name, tensor), fields)


def mamba_of_gguf(name: str, tensor: Tensor) -> Tensor:
    """Take the second dimension of decay, skip and norm away."""
    if name.rpartition(".")[2] in ("decay", "skip", "mamba_norm"):
        return reshaped(tensor, math.prod(tensor.shape))
    return tensor


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **HF_NAMES,
        **granitemoe.HF_EXPERT_NAMES,
        "gate": Fused(_GATE_UP, ("gate", "up")),
        "up": Fused(_GATE_UP, ("gate", "up")),
        "down": _DOWN,
        "shared_gate": Fused(_GATE_UP, ("shared_gate", "shared_up")),
        "shared_up": Fused(_GATE_UP, ("shared_gate", "shared_up")),
        "shared_down": _DOWN,
        "mamba_in": f"{_MIXER}in_proj.weight",
        "conv": f"{_MIXER}conv1d.weight",
        "conv_bias": f"{_MIXER}conv1d.bias",
        "dt_bias": f"{_MIXER}dt_bias",
        "decay": f"{_MIXER}A_log",
        "skip": f"{_MIXER}D",
        "mamba_norm": f"{_MIXER}norm.weight",
        "mamba2_o": f"{_MIXER}out_proj.weight",
    },
    gguf_names={
        **GGUF_NAMES,
        "mamba_in": "blk.{}.ssm_in.weight",
        "conv": "blk.{}.ssm_conv1d.weight",
        "conv_bias": "blk.{}.ssm_conv1d.bias",
        "dt_bias": "blk.{}.ssm_dt.bias",
        "decay": "blk.{}.ssm_a",
        "skip": "blk.{}.ssm_d",
        "mamba_norm": "blk.{}.ssm_norm.weight",
        "mamba2_o": "blk.{}.ssm_out.weight",
    },
    gguf_interleaved_rope=True,
    hf_fold=fold_hf,
    gguf_fold=fold_gguf,
)
