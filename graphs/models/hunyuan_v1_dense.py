"""Hunyuan 0.5B to 7B: Llama with RMS norms of each head of Q and K behind RoPE."""

from __future__ import annotations

from edgellm.graphs.architecture import HF_NAMES, Architecture, GGUFHeader, with_norms
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama

# Keys in the files of all models of the family that only the others use.
_UNUSED = (
    "attention_head_dim", "cla_share_factor", "enable_lm_head_fp32", "kv_lora_rank", "moe_topk",
    "norm_topk_prob", "num_shared_expert", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "use_rotary_pos_emb", "v_head_dim",
)  # fmt: skip


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.require("use_qk_norm", True)
    fields.require("num_experts", 1)
    fields.require("use_cla", False)
    fields.require("use_mla", False)
    fields.require("norm_type", "rms", "hf_rms", "fused")
    fields.ignore(*_UNUSED)
    return with_norms(llama.config_from_hf(fields), layers="pre", queries="head_after_rope")


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    return with_norms(llama.config_from_gguf(header), layers="pre", queries="head_after_rope")


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **HF_NAMES,
        "q_norm": "model.layers.{}.self_attn.query_layernorm.weight",
        "k_norm": "model.layers.{}.self_attn.key_layernorm.weight",
    },
)
