"""Attention over latents in config files, and the tensors of models that have it."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs import rope_scaling
from edgellm.graphs.architecture import (
    GGUF_NAMES,
    HF_NAMES,
    LATENT_UPS,
    Fused,
    GGUFHeader,
    Names,
    with_attention,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import Attention, Latent
from edgellm.graphs.models import llama

_HF = "model.layers.{}.self_attn."
_DOWN = ("v", "k")
HF_LATENT_NAMES: Names = {
    **HF_NAMES,
    "q_down": f"{_HF}q_a_proj.weight",
    "q_down_norm": f"{_HF}q_a_layernorm.weight",
    "q_up": f"{_HF}q_b_proj.weight",
    **{x: Fused(f"{_HF}kv_a_proj_with_mqa.weight", _DOWN) for x in _DOWN},
    "latent_norm": f"{_HF}kv_a_layernorm.weight",
    **{x: Fused(f"{_HF}kv_b_proj.weight", LATENT_UPS, by_heads=True) for x in LATENT_UPS},
}
GGUF_LATENT_NAMES: Names = {
    **GGUF_NAMES,
    "q_down": "blk.{}.attn_q_a.weight",
    "q_down_norm": "blk.{}.attn_q_a_norm.weight",
    "q_up": "blk.{}.attn_q_b.weight",
    **{x: Fused("blk.{}.attn_kv_a_mqa.weight", _DOWN) for x in _DOWN},
    "latent_norm": "blk.{}.attn_kv_a_norm.weight",
    "key_up": "blk.{}.attn_k_b.weight",
    "value_up": "blk.{}.attn_v_b.weight",
}


def config_from_hf(fields: Fields) -> ModelConfig:
    """Read a `config.json` of a model that attends over latents, without its experts."""
    rotated = fields.read(int, "qk_rope_head_dim")
    fields.require("head_dim", rotated)
    fields.assume({"head_dim": rotated})
    fields.require("qk_head_dim", rotated + fields.read(int, "qk_nope_head_dim"))
    fields.require("rope_interleave", True)
    latent = Latent(
        rank=fields.read(int, "kv_lora_rank"),
        key=fields.read(int, "qk_nope_head_dim"),
        value=fields.read(int, "v_head_dim"),
        query_rank=fields.optional(int, "q_lora_rank"),
    )
    config = llama.config_from_hf(fields)
    return _with_latent(config, latent, rotated, rope_scaling.score_factor_of_hf(fields))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    """Read a GGUF file of a model that attends over latents, without its experts."""
    fields = header.fields
    rotated, rank = (
        fields.read(int, "rope.dimension_count"),
        fields.read(int, "attention.kv_lora_rank"),
    )
    # without the keys for heads as they would be made, the usual ones have their widths
    widths = {
        x: fields.optional(int, f"attention.{x}_length_mla")
        or fields.read(int, f"attention.{x}_length")
        for x in ("key", "value")
    }
    for x, whole in (("key", rank + rotated), ("value", rank)):
        fields.require(f"attention.{x}_length", widths[x], whole)
    latent = Latent(
        rank=rank,
        key=widths["key"] - rotated,
        value=widths["value"],
        query_rank=fields.optional(int, "attention.q_lora_rank") or None,
    )
    config = llama.config_from_gguf(header, head_dim=rotated)
    factor = rope_scaling.score_factor_of_gguf(fields)
    if factor != 1:  # that is all of the magnitude
        config = replace(config, ropes=(replace(config.ropes[0], magnitude=1.0),))
    return _with_latent(config, latent, rotated, factor)


def _with_latent(config: ModelConfig, latent: Latent, rotated: int, factor: float) -> ModelConfig:
    """Return the config with latents in all layers.

    Args:
        factor: factor of the scores beside the usual one.
    """

    def change(_: int, attention: Attention) -> Attention:
        scale = factor / (latent.key + rotated) ** 0.5
        return replace(attention, kv_heads=1, head_dim=rotated, scale=scale, latent=latent)

    return with_attention(config, change)
