"""OLMo 2: norms only behind attention and MLP, one norm over all heads of Q and one over K's."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import HF_SANDWICH_NAMES, Architecture, GGUFHeader, with_norms
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import sliding_of_gguf, with_windows
from edgellm.graphs.models import llama

PERIOD = 4


def config_from_hf(fields: Fields) -> ModelConfig:
    return with_norms(llama.config_from_hf(fields), layers="post", queries="width")


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    """Read a GGUF file of OLMo 2, or of OLMo 3: the same architecture with a sliding window."""
    fields = header.fields
    config = with_norms(llama.config_from_gguf(header), layers="post", queries="width")
    magnitude = fields.optional(float, "rope.scaling.attn_factor")
    if magnitude is not None:
        # the converter writes the whole factor of config.json, which llama.cpp multiplies once more
        config = replace(config, ropes=(replace(config.ropes[0], magnitude=magnitude),))
    window = config.attention.window
    if window is None:
        return config
    theta = fields.positive("rope.freq_base_swa", default=fields.positive("rope.freq_base"))
    sliding = sliding_of_gguf(fields, config.layer_count, period=PERIOD)
    local = rope_scaling.plain(config.head_dim, theta)
    return with_windows(config, sliding, window, local=local)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=HF_SANDWICH_NAMES,
)
