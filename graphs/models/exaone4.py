"""EXAONE 4: norms only behind attention and MLP, and of each head of Q and K.

The large model has windows; its layers without a window have no positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.graphs.architecture import HF_SANDWICH_NAMES, Architecture, GGUFHeader, with_norms
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import sliding_of_gguf, sliding_of_hf, with_windows
from edgellm.graphs.models import llama, smollm3

_PERIOD = 4


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"sliding_window": 4096})
    config = with_norms(llama.config_from_hf(fields), layers="post", queries="head")
    window = fields.optional(int, "sliding_window")
    if window is None:
        fields.ignore("sliding_window_pattern", "layer_types")
        return config
    sliding = sliding_of_hf(fields, config.layer_count, period=_PERIOD)
    return _windowed(config, sliding, window)


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = with_norms(llama.config_from_gguf(header), layers="post", queries="head")
    window = config.attention.window
    if window is None:
        return config
    sliding = sliding_of_gguf(header.fields, config.layer_count, period=_PERIOD)
    return _windowed(config, sliding, window)


def _windowed(config: ModelConfig, sliding: Sequence[bool], window: int) -> ModelConfig:
    return smollm3.with_nope(with_windows(config, sliding, window), sliding)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=HF_SANDWICH_NAMES,
)
