"""ERNIE 4.5 without experts: Llama whose RoPE turns neighbouring channels, in all file formats."""

from __future__ import annotations

from edgellm.graphs.architecture import Architecture
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama


def config_from_hf(fields: Fields) -> ModelConfig:
    bias = fields.optional(bool, "use_bias") or False
    # the family has a default `head_dim`, where others divide hidden_size by the heads
    fields.assume(
        {
            "attention_bias": bias,
            "mlp_bias": bias,
            "head_dim": 128,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        }
    )
    return llama.config_from_hf(fields)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=llama.config_from_gguf,
    hf_interleaved_rope=True,
    gguf_interleaved_rope=True,
)
