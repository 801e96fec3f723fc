"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, windows in even layers."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import (
    GGUF_NAMES,
    HF_NAMES,
    Architecture,
    Fused,
    GGUFHeader,
    with_attention,
    with_layers,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.experts import experts_from_gguf, routing_from_hf, with_experts
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import by_period, sliding_of_hf, with_windows
from edgellm.graphs.models import llama

_EXPERTS = "model.layers.{}.mlp.experts."
_GATE_UP = ("gate", "up")
_PERIOD = 2


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"attention_bias": True, "sliding_window": 128, "rope_theta": 150000.0})
    fields.require("swiglu_limit", 7.0)
    fields.require("swiglu_alpha", 1.702)
    # older names of keys that are there as well
    fields.ignore("experts_per_token", "initial_context_length")
    config = llama.config_from_hf(fields)
    sliding = sliding_of_hf(fields, config.layer_count, period=_PERIOD)
    config = with_windows(config, sliding, fields.optional(int, "sliding_window"))
    experts = replace(routing_from_hf(fields, normalized=True), bias=True)
    return with_experts(_changed(config), experts)


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = llama.config_from_gguf(header)
    # files do not say that the limits of the blended pairs are not rounded, as in config.json
    rope = rope_scaling.from_gguf(header, head_dim=config.head_dim, truncate=False)
    window = config.attention.window
    config = with_windows(config, by_period(config.layer_count, _PERIOD), window)
    config = experts_from_gguf(replace(config, ropes=(rope,)), header, normalized=True)
    return _changed(config)


def _changed(config: ModelConfig) -> ModelConfig:
    config = with_attention(config, lambda _, a: replace(a, sinks=True))
    return with_layers(
        config,
        lambda _, x: replace(x, mlp=replace(x.mlp, activation="clamped_swiglu", bias=True)),
    )


def _fused(kind: str) -> Fused:
    return Fused(f"{_EXPERTS}gate_up_proj{kind}", _GATE_UP, interleaved=True, transposed=kind == "")


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **HF_NAMES,
        "sinks": "model.layers.{}.self_attn.sinks",
        "router": "model.layers.{}.mlp.router.weight",
        "router_bias": "model.layers.{}.mlp.router.bias",
        **{f"expert_{x}": _fused("") for x in _GATE_UP},
        **{f"expert_{x}_bias": _fused("_bias") for x in _GATE_UP},
        "expert_down": Fused(f"{_EXPERTS}down_proj", ("down",), transposed=True),
        "expert_down_bias": f"{_EXPERTS}down_proj_bias",
    },
    gguf_names={**GGUF_NAMES, "mlp_norm": "blk.{}.post_attention_norm.weight"},
)
