"""Ministral 3: Llama with YaRN, limited to the original context before its extension."""

from __future__ import annotations

from edgellm.errors import ModelFormatError
from edgellm.graphs.architecture import Architecture
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama, mistral


def config_from_hf(fields: Fields) -> ModelConfig:
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        raise ModelFormatError(
            f"{fields.origin}: rope_parameters is missing; Ministral 3 has no usual ones"
        )
    return mistral.config_from_hf(fields)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=llama.config_from_gguf,
    gguf_interleaved_rope=True,
)
