"""Llama 2 and 3 and the many models of the same shape (SmolLM2, TinyLlama, Yi ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm.graphs import rope_scaling
from edgellm.graphs.config import Fields, ModelConfig

HF_TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.attention_norm": "model.layers.{}.input_layernorm.weight",
    "layers.q": "model.layers.{}.self_attn.q_proj.weight",
    "layers.k": "model.layers.{}.self_attn.k_proj.weight",
    "layers.v": "model.layers.{}.self_attn.v_proj.weight",
    "layers.o": "model.layers.{}.self_attn.o_proj.weight",
    "layers.mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.gate": "model.layers.{}.mlp.gate_proj.weight",
    "layers.up": "model.layers.{}.mlp.up_proj.weight",
    "layers.down": "model.layers.{}.mlp.down_proj.weight",
}

GGUF_TENSORS = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "layers.attention_norm": "blk.{}.attn_norm.weight",
    "layers.q": "blk.{}.attn_q.weight",
    "layers.k": "blk.{}.attn_k.weight",
    "layers.v": "blk.{}.attn_v.weight",
    "layers.o": "blk.{}.attn_output.weight",
    "layers.mlp_norm": "blk.{}.ffn_norm.weight",
    "layers.gate": "blk.{}.ffn_gate.weight",
    "layers.up": "blk.{}.ffn_up.weight",
    "layers.down": "blk.{}.ffn_down.weight",
}

# llama.cpp's converter reorders the rows of q and k for its interleaved RoPE.
GGUF_INTERLEAVED_ROPE = True


def config_from_hf(values: Mapping[str, Any], *, origin: str) -> ModelConfig:
    """A `config.json` as a ModelConfig; what this file does not compute is refused by name."""
    fields = Fields(values, origin=origin)
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    hidden_size, heads = fields.read(int, "hidden_size"), fields.read(int, "num_attention_heads")
    head_dim = fields.optional(int, "head_dim") or hidden_size // max(heads, 1)
    return ModelConfig(
        model_type=fields.read(str, "model_type"),
        vocab_size=fields.read(int, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.read(int, "intermediate_size"),
        layers=fields.read(int, "num_hidden_layers"),
        heads=heads,
        kv_heads=fields.optional(int, "num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=fields.read(float, "rms_norm_eps"),
        context_length=fields.read(int, "max_position_embeddings"),
        inv_freq=rope_scaling.from_hf(values, dim=head_dim, origin=origin),
        sliding_window=None,
        tied_embedding=fields.optional(bool, "tie_word_embeddings") or False,
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied_embedding: bool,
    rope_factors: list[float] | None,
    origin: str,
) -> ModelConfig:
    """GGUF's `llama.*` keys as a ModelConfig."""
    fields = Fields(metadata, origin=origin)
    fields.require("llama.expert_count", 0)
    fields.require("llama.rope.scaling.type", "none", "linear")
    hidden_size = fields.read(int, "llama.embedding_length")
    heads = fields.read(int, "llama.attention.head_count")
    head_dim = fields.optional(int, "llama.attention.key_length") or hidden_size // max(heads, 1)
    fields.require("llama.attention.value_length", head_dim)
    inv_freq = rope_scaling.base_frequencies(
        fields.optional(int, "llama.rope.dimension_count") or head_dim,
        fields.optional(float, "llama.rope.freq_base") or 10000.0,
    )
    if fields.optional(str, "llama.rope.scaling.type") == "linear":
        factor = fields.read(float, "llama.rope.scaling.factor")
        inv_freq = rope_scaling.scale_linear(inv_freq, factor)
    if rope_factors is not None:
        inv_freq = rope_scaling.scale_by_factors(inv_freq, rope_factors)
    return ModelConfig(
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.read(int, "llama.feed_forward_length"),
        layers=fields.read(int, "llama.block_count"),
        heads=heads,
        kv_heads=fields.optional(int, "llama.attention.head_count_kv") or heads,
        head_dim=head_dim,
        rms_norm_eps=fields.read(float, "llama.attention.layer_norm_rms_epsilon"),
        context_length=fields.read(int, "llama.context_length"),
        inv_freq=tuple(inv_freq.tolist()),
        sliding_window=None,
        tied_embedding=tied_embedding,
    )
