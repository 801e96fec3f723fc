"""Settings of released config.json files of models with states, some of them with experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import EdgeLLMError
from edgellm.graphs.layer_kinds import FULL
from edgellm.graphs.safetensors_checkpoint import read_config
from edgellm.graphs.tensors import parameters, used_parameters

_QWEN35: Mapping[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
_ATTENDING = (5, 15, 25, 35)  # layers of Granite 4
RELEASED: dict[str, Mapping[str, Any]] = {
    "LFM2-1.2B": {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 2048,
        "conv_dim_out": 2048,
        "conv_use_xavier_init": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048,
        "max_position_embeddings": 128000,
        "model_type": "lfm2",
        "norm_eps": 1e-05,
        "num_attention_heads": 32,
        "num_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "use_pos_enc": True,
        "vocab_size": 65536,
    },
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5",
        "image_token_id": 248056,
        "text_config": {
            **_QWEN35,
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "linear_num_value_heads": 16,
            "mlp_only_layers": [],
            "num_attention_heads": 8,
            "num_hidden_layers": 24,
        },
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "qwen3_5"},
    },
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **_QWEN35,
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "linear_num_value_heads": 32,
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
        },
        "tie_word_embeddings": False,
    },
    "granite-4.0-h-tiny": {
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "layer_types": ["attention" if i in _ATTENDING else "mamba" for i in range(40)],
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "position_embedding_type": "nope",
        "rms_norm_eps": 1e-05,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
    "LFM2-8B-A1B": {
        "conv_L_cache": 3,
        "conv_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "layer_types": [FULL if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "max_position_embeddings": 128000,
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "tie_embedding": True,
        "use_expert_bias": True,
        "vocab_size": 65536,
    },
    "Qwen3-Next-80B-A3B-Instruct": {
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
RELEASED["Falcon-H1-0.5B-Instruct"] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "vocab_size": 32784,
}
RELEASED["granite-4.0-h-1b"] = {
    **RELEASED["granite-4.0-h-tiny"],
    "intermediate_size": 4096,
    "num_experts_per_tok": 0,
    "num_local_experts": 0,
    "shared_intermediate_size": 4096,
}


@pytest.mark.parametrize(
    ("name", "billions", "used", "context"),
    [
        ("LFM2-1.2B", 1.17, 1.17, 128000),
        ("LFM2-8B-A1B", 8.34, 1.56, 128000),
        ("Qwen3.5-0.8B", 0.75, 0.75, 262144),
        ("Qwen3.5-35B-A3B", 34.66, 3.45, 262144),
        ("Qwen3-Next-80B-A3B-Instruct", 79.67, 3.88, 262144),
        ("Falcon-H1-0.5B-Instruct", 0.52, 0.52, 16384),
        ("granite-4.0-h-tiny", 6.94, 1.47, 131072),
        ("granite-4.0-h-1b", 1.46, 1.46, 131072),
    ],
)
def test_released_models_have_their_size(
    tmp_path: Path, name: str, billions: float, used: float, context: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
    config = read_config(tmp_path).config
    assert parameters(config) / 1e9 == pytest.approx(billions, abs=0.006)
    assert used_parameters(config) / 1e9 == pytest.approx(used, abs=0.006)
    assert config.context_length == context


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("LFM2-8B-A1B", {"conv_bias": True}, "conv_bias"),
        ("Falcon-H1-0.5B-Instruct", {"ssm_multipliers": [1.0]}, "5 numbers above 0"),
        ("Falcon-H1-0.5B-Instruct", {"mlp_multipliers": [1.0, -1.0]}, "2 numbers above 0"),
        ("Falcon-H1-0.5B-Instruct", {"key_multiplier": 0.0}, "key_multiplier"),
        ("Falcon-H1-0.5B-Instruct", {"mamba_d_ssm": 1537}, "1537 channels of Mamba-2"),
        ("Falcon-H1-0.5B-Instruct", {"attention_bias": True}, "attention_bias = True"),
        (
            "Falcon-H1-0.5B-Instruct",
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "mamba_norm_before_gate = True",
        ),
        ("Qwen3-Next-80B-A3B-Instruct", {"use_sliding_window": True}, "use_sliding_window"),
        ("Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": 0}, "interval is 0"),
    ],
)
def test_settings_that_are_refused(
    tmp_path: Path, name: str, changes: Mapping[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RELEASED[name], **changes}))
    with pytest.raises(EdgeLLMError, match=words):
        read_config(tmp_path)
