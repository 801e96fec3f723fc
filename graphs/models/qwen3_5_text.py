"""Qwen3.5 and Qwen3.6, dense: gated delta nets, and attention with a gate in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgellm.errors import ModelFormatError
from edgellm.graphs.architecture import (
    GGUF_NAMES,
    HF_NAMES,
    Architecture,
    Fused,
    GGUFHeader,
    Names,
    with_attention,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import FULL, mixers_of_hf, with_mixers
from edgellm.graphs.models import lfm2, llama
from edgellm.graphs.state_mixers import DeltaNet
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.translation import with_values

_LINEAR, _PERIOD = "linear_attention", 4
_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": _PERIOD,
}
_LAYER, _DELTA = "model.layers.{}", "model.layers.{}.linear_attn"


def config_from_hf(fields: Fields, *, intermediate: str = "intermediate_size") -> ModelConfig:
    """Read a `config.json` of Qwen3.5.

    Args:
        intermediate: key of the width of the MLP.
    """
    fields.assume(_DEFAULTS)
    fields.require("attention_bias", False)
    fields.require("attn_output_gate", True)
    fields.require("output_gate_type", "swish")  # of the delta nets
    fields.ignore("mamba_ssm_dtype")  # of the states: always float32 here
    config = llama.config_from_hf(fields, intermediate=intermediate, partial=True)
    period = fields.read(int, "full_attention_interval")
    types = mixers_of_hf(fields, config.layer_count, others=(_LINEAR,))
    attends = _periodic(fields, config.layer_count, period)
    if types is not None:
        attends = [each == FULL for each in types]
    net = DeltaNet(
        key_heads=fields.read(int, "linear_num_key_heads"),
        value_heads=fields.read(int, "linear_num_value_heads"),
        key_dim=fields.read(int, "linear_key_head_dim"),
        value_dim=fields.read(int, "linear_value_head_dim"),
        taps=fields.read(int, "linear_conv_kernel_dim"),
    )
    return _mixed(config, attends, net)


def config_from_gguf(header: GGUFHeader, *, tiled: bool = True) -> ModelConfig:
    """Read the keys of a GGUF file of Qwen3.5.

    Args:
        tiled: whether the converter reorders the value heads of delta nets (see `DeltaNet`).
    """
    fields = header.fields
    config = llama.config_from_gguf(header)
    fields.ignore("rope.dimension_sections")  # of positions in pictures
    count = config.layer_count - (fields.optional(int, "nextn_predict_layers") or 0)
    config = replace(config, layers=config.layers[:count])
    period = fields.optional(int, "full_attention_interval") or _PERIOD
    recurrent = fields.entries(bool, "attention.recurrent_layers", count)
    attends = _periodic(fields, count, period)
    if recurrent is not None:
        attends = [not each for each in recurrent]
    key_heads, heads = fields.read(int, "ssm.group_count"), fields.read(int, "ssm.time_step_rank")
    net = DeltaNet(
        key_heads=key_heads,
        value_heads=heads,
        key_dim=fields.read(int, "ssm.state_size"),
        value_dim=fields.read(int, "ssm.inner_size") // max(heads, 1),
        taps=fields.read(int, "ssm.conv_kernel"),
        tiled=tiled and key_heads != heads,
    )
    return _mixed(config, attends, net)


def fold_hf(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    """Give norms, which are stored less one, and decay rates their values."""
    part = name.rpartition(".")[2]
    if part.endswith("norm") and part != "delta_norm":
        return with_values(tensor, lambda values: values + 1)
    if part == "decay":
        return with_values(tensor, lambda values: -np.exp(values))
    return lfm2.fold_hf(name, tensor, fields)


def _periodic(fields: Fields, count: int, period: int) -> list[bool]:
    if period < 1:
        raise ModelFormatError(f"{fields.origin}: full_attention_interval is {period}; 1 or more")
    return [(index + 1) % period == 0 for index in range(count)]


def _mixed(config: ModelConfig, attends: list[bool], net: DeltaNet) -> ModelConfig:
    config = with_attention(config, lambda _, a: replace(a, qk_norm="head", output_gate=True))
    return with_mixers(config, [None if each else net for each in attends])


def _gated(name: str) -> Names:
    """Name the tensor with the rows of Q and of the gate, one behind the other in each head."""
    return {part: Fused(name, ("q", "q_gate"), by_heads=True) for part in ("q", "q_gate")}


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **HF_NAMES,
        **_gated(f"{_LAYER}.self_attn.q_proj.weight"),
        **{f"delta_{x}": f"{_DELTA}.in_proj_{x}.weight" for x in ("qkv", "z", "a", "b")},
        "conv": f"{_DELTA}.conv1d.weight",
        "decay": f"{_DELTA}.A_log",
        "dt_bias": f"{_DELTA}.dt_bias",
        "delta_norm": f"{_DELTA}.norm.weight",
        "delta_net_o": f"{_DELTA}.out_proj.weight",
    },
    gguf_names={
        **GGUF_NAMES,
        **_gated("blk.{}.attn_q.weight"),
        "delta_qkv": "blk.{}.attn_qkv.weight",
        "delta_z": "blk.{}.attn_gate.weight",
        "delta_a": "blk.{}.ssm_alpha.weight",
        "delta_b": "blk.{}.ssm_beta.weight",
        "conv": "blk.{}.ssm_conv1d.weight",
        "decay": "blk.{}.ssm_a",
        "dt_bias": "blk.{}.ssm_dt.bias",
        "delta_norm": "blk.{}.ssm_norm.weight",
        "delta_net_o": "blk.{}.ssm_out.weight",
        "mlp_norm": "blk.{}.post_attention_norm.weight",
    },
    hf_fold=fold_hf,
    mtp=True,
)
