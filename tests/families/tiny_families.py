"""Families and the settings of a tiny model of each: a class of transformers and its config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_THETA = {"rope_theta": 5000.0}
_DEFAULT = {"rope_type": "default", **_THETA}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    **_THETA,
}
# As released models of OLMo 3 say it, though it is the usual one.
_YARN_FACTOR = {"attention_factor": 0.1 * math.log(4.0) + 1}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.5,
}
_WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 2e4,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
_LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_HYBRID = {
    **_MULTIPLIERS,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-3,
}
_FALCON_H1 = {
    "num_hidden_layers": 2,
    "head_dim": 32,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "rope_parameters": _DEFAULT,
}
# Name -> class of transformers without `Config` and `ForCausalLM`, and what its config says.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _DEFAULT}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma2_capped": (
        "Gemma2",
        {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,  # which has no effect
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3n_text": (
        "Gemma3nText",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 32,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.7, 0.95, 0.3, 0.0, 0.5, 0.0],
            "intermediate_size": [96, 96, 96, 192, 192, 192],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 2e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma4_text": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_unified": ("Gemma4UnifiedText", {**_GEMMA4, "attention_k_eq_v": True}),
    "gemma4_experts": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 24, "rope_parameters": _DEFAULT}),
    "phi3_longrope": (
        "Phi3",
        {
            "num_attention_heads": 2,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + i / 8 for i in range(12)],
                "long_factor": [2.0 + i for i in range(12)],
                **_THETA,
            },
        },
    ),
    "granite": ("Granite", _MULTIPLIERS),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_MULTIPLIERS,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["full_attention"] * 4,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid_mamba": ("GraniteMoeHybrid", _HYBRID),
    "granitemoehybrid_experts": (
        "GraniteMoeHybrid",
        {**_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64},
    ),
    "granitemoehybrid_narrow": (
        "GraniteMoeHybrid",
        {
            **_HYBRID,
            "num_hidden_layers": 3,
            "layer_types": ["attention", "mamba", "mamba"],
            "position_embedding_type": "rope",
            "mamba_n_heads": 2,
            "mamba_d_head": 64,
            "mamba_d_state": 48,
            "mamba_n_groups": 1,
            "mamba_d_conv": 2,
            "mamba_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **_FALCON_H1,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.5,
            "ssm_multipliers": [0.8, 0.9, 1.1, 0.7, 1.4],
            "mlp_multipliers": [0.9, 0.4],
        },
    ),
    "falcon_h1_normed": (
        "FalconH1",
        {
            **_FALCON_H1,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "embedding_multiplier": 2.0,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "olmo2": ("Olmo2", {"rope_parameters": _DEFAULT}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {**_YARN, **_YARN_FACTOR},
                "sliding_attention": _DEFAULT,
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **_YARN,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4_windows": ("Exaone4", {"sliding_window": 8, "layer_types": _WINDOWS}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 32, "use_bias": True}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "seed_oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "intermediate_size": 144,
            "block_multiple_of": 32,
            "norm_eps": 1e-3,
        },
    ),
    "lfm2_narrow": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 5,
            "tie_embedding": False,
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5Text",
        {
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "qwen3_5_text_even": (
        "Qwen3_5Text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "head_dim": 64,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        {
            "num_hidden_layers": 2,
            "full_attention_interval": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 8},
    ),
    "granitemoe": (
        "GraniteMoe",
        {**_MULTIPLIERS, "num_local_experts": 7, "num_experts_per_tok": 3},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "decoder_sparse_step": 1,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
            "rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2_groups": (
        "DeepseekV2",
        {
            **_LATENT,
            "num_hidden_layers": 2,
            "q_lora_rank": 32,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _DEFAULT,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": 64,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **_LATENT,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": _DEFAULT,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "norm_eps": 1e-3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 1.3,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
}
