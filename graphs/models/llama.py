"""Llama 2 and 3 and the many models of the same shape (SmolLM2, MiniCPM5, TinyLlama, Yi ...)."""

from __future__ import annotations

from dataclasses import replace

from edgellm.errors import UnsupportedModelError
from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import Architecture, GGUFHeader, with_layers
from edgellm.graphs.config import ModelConfig, repeated
from edgellm.graphs.experts import experts_from_gguf
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import Activation, Attention, LayerConfig, Mlp

# Name of an activation in config files -> our name.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def config_from_hf(
    fields: Fields,
    *,
    norm_eps: str = "rms_norm_eps",
    intermediate: str | int = "intermediate_size",
    activation: Activation | None = None,
    layer_type: str | None = None,
    partial: bool = False,
) -> ModelConfig:
    """Read Llama's fields of a `config.json` as a ModelConfig, which other families change.

    Args:
        norm_eps, intermediate: keys of these two fields in the family's files, or the width itself.
        activation: activation in place of the one that the file names; None: the file's.
        layer_type: type of the layers whose RoPE to take, if each type has its own.
        partial: whether RoPE may turn a part of a head (see `rope_scaling.from_hf`).
    """
    hidden_size, heads = fields.read(int, "hidden_size"), fields.read(int, "num_attention_heads")
    head_dim = fields.optional(int, "head_dim") or hidden_size // max(heads, 1)
    fields.require("is_causal", True)
    bias = fields.optional(bool, "attention_bias") or False
    layer = LayerConfig(
        mixer=Attention(
            heads=heads,
            kv_heads=fields.optional(int, "num_key_value_heads") or heads,
            head_dim=head_dim,
            qkv_bias=bias,
            output_bias=bias,
        ),
        mlp=Mlp(
            intermediate=fields.read(int, intermediate)
            if isinstance(intermediate, str)
            else intermediate,
            activation=activation or _activation(fields, "hidden_act"),
            bias=fields.optional(bool, "mlp_bias") or False,
        ),
    )
    return ModelConfig(
        model_type=fields.read(str, "model_type"),
        vocab_size=fields.read(int, "vocab_size"),
        hidden_size=hidden_size,
        layers=repeated(layer, fields.read(int, "num_hidden_layers")),
        ropes=(
            rope_scaling.from_hf(fields, head_dim=head_dim, layer_type=layer_type, partial=partial),
        ),
        norm_eps=fields.read(float, norm_eps),
        context_length=rope_scaling.context_of_hf(fields, layer_type=layer_type),
        tied_embedding=fields.optional(bool, "tie_word_embeddings") or False,
    )


def config_from_gguf(
    header: GGUFHeader,
    *,
    norm_eps: str = "attention.layer_norm_rms_epsilon",
    hybrid: bool = False,
    head_dim: int | None = None,
) -> ModelConfig:
    """Read Llama's keys of a GGUF file as a ModelConfig, which other families change.

    Args:
        norm_eps: key of the norms' epsilon in the family's files.
        hybrid: whether layers may have 0 KV heads, as they do not attend.
        head_dim: width of heads in place of that in the file.
    """
    fields = header.fields
    fields.require("attention.causal", True)
    hidden_size, heads = (
        fields.read(int, "embedding_length"),
        fields.uniform("attention.head_count"),
    )
    if head_dim is None:
        head_dim = fields.optional(int, "attention.key_length") or hidden_size // max(heads, 1)
        fields.require("attention.value_length", head_dim)
    biases = {x for x in ("q", "qkv", "output") if f"blk.0.attn_{x}.bias" in header.tensors}
    layer = LayerConfig(
        mixer=Attention(
            heads=heads,
            kv_heads=fields.uniform("attention.head_count_kv", default=heads, but_zeros=hybrid),
            head_dim=head_dim,
            # files write 0 for no window
            window=fields.optional(int, "attention.sliding_window") or None,
            qkv_bias="q" in biases or "qkv" in biases,
            output_bias="output" in biases,
        ),
        mlp=Mlp(
            intermediate=fields.uniform("feed_forward_length"),
            bias="blk.0.ffn_down.bias" in header.tensors,
        ),
    )
    return ModelConfig(
        model_type=header.model_type,
        vocab_size=header.vocab_size,
        hidden_size=hidden_size,
        layers=repeated(layer, fields.read(int, "block_count")),
        ropes=(rope_scaling.from_gguf(header, head_dim=head_dim),),
        norm_eps=fields.read(float, norm_eps),
        context_length=rope_scaling.context_of_gguf(header),
        tied_embedding="output.weight" not in header.tensors,
    )


def _config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = config_from_gguf(header)
    if not header.fields.optional(int, "expert_count"):
        return config
    # Mixtral, whose files have this architecture too
    return experts_from_gguf(config, header, normalized=True)


def with_activation(config: ModelConfig, activation: Activation) -> ModelConfig:
    """Return the config with another activation, which GGUF files do not name."""
    return with_layers(config, lambda _, x: replace(x, mlp=replace(x.mlp, activation=activation)))


def _activation(fields: Fields, key: str) -> Activation:
    name = fields.optional(str, key) or "silu"
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.origin}: {key} = {name!r} is not supported; supported are "
            + ", ".join(_ACTIVATIONS)
        )
    if _ACTIVATIONS[name] == "silu":
        # Falcon 3 names its activation under this key too
        fields.require("activation", "swiglu")
    return _ACTIVATIONS[name]


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=_config_from_gguf,
    gguf_interleaved_rope=True,  # llama.cpp's converter reorders the rows of q and k
)
