"""SmolLM3: Llama where every fourth layer has no positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.graphs.architecture import Architecture, GGUFHeader, with_attention
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import by_period, layer_types, with_windows
from edgellm.graphs.models import llama
from edgellm.graphs.rope_scaling import no_rotation

_PERIOD = 4


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.require("use_sliding_window", False)
    fields.assume({"rope_theta": 2e6, "tie_word_embeddings": True})
    config = llama.config_from_hf(fields)
    # transformers masks by `layer_types`, whatever `use_sliding_window` says
    fields.ignore("max_window_layers")
    sliding = layer_types(fields, config.layer_count) or [False] * config.layer_count
    config = with_windows(config, sliding, fields.optional(int, "sliding_window"))
    period = fields.optional(int, "no_rope_layer_interval") or _PERIOD
    rotates = fields.entries(int, "no_rope_layers", config.layer_count)
    return with_nope(config, rotates or by_period(config.layer_count, period))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = llama.config_from_gguf(header)
    return with_nope(config, by_period(config.layer_count, _PERIOD))


def with_nope(config: ModelConfig, rotates: Sequence[int]) -> ModelConfig:
    """Return the config with RoPE only in the layers whose entry in `rotates` is true."""
    if all(rotates):
        return config
    config = replace(config, ropes=(config.ropes[0], no_rotation(config.ropes[0])))
    return with_attention(config, lambda i, a: replace(a, rope=0 if rotates[i] else 1))


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    gguf_interleaved_rope=True,
)
