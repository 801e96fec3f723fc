"""Mistral 7B: Llama's tensors, with a sliding window in v0.1. (Its GGUF files say `llama`.)"""

from __future__ import annotations

from edgellm.graphs.architecture import Architecture
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import with_windows
from edgellm.graphs.models import llama


def config_from_hf(
    fields: Fields, *, norm_eps: str = "rms_norm_eps", partial: bool = False
) -> ModelConfig:
    """Read a `config.json` as Llama's, with a sliding window in all layers if the file has one.

    Args:
        norm_eps, partial: as in `llama.config_from_hf`.
    """
    window = fields.optional(int, "sliding_window")
    config = llama.config_from_hf(fields, norm_eps=norm_eps, partial=partial)
    return with_windows(config, [window is not None] * config.layer_count, window)


def _config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"sliding_window": 4096})
    return config_from_hf(fields)


ARCHITECTURE = Architecture(config_from_hf=_config_from_hf)
