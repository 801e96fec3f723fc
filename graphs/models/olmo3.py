"""OLMo 3: OLMo 2 with a window, and RoPE without scaling, in three of four layers.

(Its GGUF files say `olmo2`.)
"""

from __future__ import annotations

from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import HF_SANDWICH_NAMES, Architecture, with_norms
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import FULL, sliding_of_hf, with_windows
from edgellm.graphs.models import llama, olmo2


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume({"rope_theta": 5e5, "sliding_window": 4096})
    config = llama.config_from_hf(fields, layer_type=FULL)
    config = with_norms(config, layers="post", queries="width")
    theta = fields.read(float, "rope_theta")
    local = rope_scaling.local_from_hf(fields, head_dim=config.head_dim, theta=theta)
    sliding = sliding_of_hf(fields, config.layer_count, period=olmo2.PERIOD)
    return with_windows(config, sliding, fields.optional(int, "sliding_window"), local=local)


ARCHITECTURE = Architecture(config_from_hf=config_from_hf, hf_names=HF_SANDWICH_NAMES)
