"""Gemma 3: five of every six layers have a window and RoPE of their own; norms of Q and K."""

from __future__ import annotations

from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import HF_SANDWICH_NAMES, Architecture, GGUFHeader, with_norms
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import FULL, sliding_of_gguf, sliding_of_hf, with_windows
from edgellm.graphs.models import gemma, gemma2

_PERIOD = 6
_LOCAL_THETA = 10000.0
_LAYERS_27B = 62
# Defaults of keys that the files of multimodal models leave out.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume(_DEFAULTS)
    config = gemma.config_from_hf(fields, layer_type=FULL)
    theta = fields.positive("rope_local_base_freq", default=_LOCAL_THETA)
    local = rope_scaling.local_from_hf(fields, head_dim=config.head_dim, theta=theta)
    sliding = sliding_of_hf(fields, config.layer_count, period=_PERIOD)
    fields.optional(float, "attn_logit_softcapping")  # transformers does not apply it either
    config = with_norms(config, layers="sandwich", queries="head")
    return gemma2.capped(
        with_windows(config, sliding, fields.optional(int, "sliding_window"), local=local),
        scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        scores=None,
        logits=fields.optional(float, "final_logit_softcapping"),
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    fields = header.fields
    config = gemma.config_from_gguf(header)
    config = with_norms(config, layers="sandwich", queries="head")
    theta = fields.positive("rope.freq_base_swa", default=_LOCAL_THETA)
    local = rope_scaling.plain(config.head_dim, theta)
    window = config.attention.window
    # a file without a window has none in any layer
    period = 1 if window is None else _PERIOD
    sliding = sliding_of_gguf(fields, config.layer_count, period=period)
    return gemma2.capped(
        with_windows(config, sliding, window, local=local),
        scale=gemma2.gguf_scale(config, layers_27b=_LAYERS_27B),
        scores=None,
        logits=fields.optional(float, "final_logit_softcapping"),
    )


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names=HF_SANDWICH_NAMES,
    hf_fold=gemma.fold,
)
