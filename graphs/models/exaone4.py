"""EXAONE 4: norms only behind attention and MLP, and of each head of Q and K.

The large model has windows; its layers without a window have no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.graphs.architecture import (
    HF_SANDWICH_NAMES,
    Architecture,
    GGUFHeader,
    with_attention,
    with_layers,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import sliding_of_gguf, sliding_of_hf, with_windows
from edgellm.graphs.models import llama, smollm3

_PERIOD = 4


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"sliding_window": 4096})
    config = llama.config_from_hf(fields)
    window = fields.optional(int, "sliding_window")
    if window is None:
        fields.ignore("sliding_window_pattern", "layer_types")
        return _normed(config)
    sliding = sliding_of_hf(fields, config.layer_count, period=_PERIOD)
    return _windowed(_normed(config), sliding, window)


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = _normed(llama.config_from_gguf(header))
    window = config.attention.window
    if window is None:
        return config
    sliding = sliding_of_gguf(header.fields, config.layer_count, period=_PERIOD)
    return _windowed(config, sliding, window)


def _normed(config: ModelConfig) -> ModelConfig:
    config = with_attention(config, lambda _, a: replace(a, qk_norm="head"))
    return with_layers(config, lambda _, layer: replace(layer, norms="post"))


def _windowed(config: ModelConfig, sliding: Sequence[bool], window: int) -> ModelConfig:
    return smollm3.with_nope(with_windows(config, sliding, window), sliding)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=HF_SANDWICH_NAMES,
)
