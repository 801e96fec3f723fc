"""StarCoder2: layer norms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import HF_NAMES, Architecture, GGUFHeader, with_layers
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama, mistral

# Keys of the first StarCoder, which released files still have.
_UNUSED = (
    "activation_function",
    "layer_norm_epsilon",
    "scale_attention_softmax_in_fp32",
    "scale_attn_weights",
)


def config_from_hf(fields: Fields) -> ModelConfig:
    bias = fields.optional(bool, "use_bias") is not False
    fields.require("norm_type", "layer_norm")
    fields.require("mlp_type", "default")
    fields.ignore(*_UNUSED)
    fields.assume({"attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": True})
    fields.assume({"hidden_act": "gelu_pytorch_tanh"})
    return _ungated(mistral.config_from_hf(fields, norm_eps="norm_epsilon"))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = llama.config_from_gguf(header, norm_eps="attention.layer_norm_epsilon")
    return _ungated(llama.with_activation(config, "gelu_tanh"))


def _ungated(config: ModelConfig) -> ModelConfig:
    config = with_layers(config, lambda _, x: replace(x, mlp=replace(x.mlp, gated=False)))
    return replace(config, norm="layer")


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **HF_NAMES,
        "final_norm_bias": "model.norm.bias",
        "attention_norm_bias": "model.layers.{}.input_layernorm.bias",
        "mlp_norm_bias": "model.layers.{}.post_attention_layernorm.bias",
        "up": "model.layers.{}.mlp.c_fc.weight",
        "up_bias": "model.layers.{}.mlp.c_fc.bias",
        "down": "model.layers.{}.mlp.c_proj.weight",
        "down_bias": "model.layers.{}.mlp.c_proj.bias",
    },
)
