"""Gemma 1 and CodeGemma: scaled embeddings, GeGLU, and norms whose weights are stored less one."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import Architecture, GGUFHeader
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.translation import with_values

_TANH = "gelu_pytorch_tanh"


def config_from_hf(fields: Fields, *, layer_type: str | None = None) -> ModelConfig:
    """Read a `config.json` of Gemma, or the fields that Gemma 2 and 3 share with it.

    Args:
        layer_type: as in `llama.config_from_hf`.
    """
    # files of the first Gemma have "gelu" here, which means the approximation
    fields.require("hidden_act", "gelu", _TANH)
    fields.require("hidden_activation", _TANH)
    fields.require("use_bidirectional_attention", False)
    fields.assume({"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True})
    return _scaled(llama.config_from_hf(fields, activation="gelu_tanh", layer_type=layer_type))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    return _scaled(llama.with_activation(llama.config_from_gguf(header), "gelu_tanh"))


def fold(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    """Add 1 to the weights of norms, which are stored less one."""
    return with_values(tensor, lambda values: values + 1) if name.endswith("norm") else tensor


def _scaled(config: ModelConfig) -> ModelConfig:
    return replace(config, embedding_scale=config.hidden_size**0.5)


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf, config_from_gguf=config_from_gguf, hf_fold=fold
)
