"""Settings of released config.json files of models with experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.layer_kinds import FULL, SLIDING
from edgellm.graphs.safetensors_checkpoint import read_config
from edgellm.graphs.tensors import parameters, used_parameters
from edgellm.kernels.experts import Routing

RELEASED: Mapping[str, Mapping[str, Any]] = {
    "gpt-oss-20b": {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": [SLIDING, FULL] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "GLM-4.5-Air": {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "Qwen1.5-MoE-A2.7B": {
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "OLMoE-1B-7B-0924": {
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "Mixtral-8x7B-v0.1": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "granite-3.1-1b-a400m-base": {
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 131072,
        "model_type": "granitemoe",
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
}


@pytest.mark.parametrize(
    ("name", "billions", "used", "routing"),
    [
        ("gpt-oss-20b", 20.91, 4.19, Routing(experts=32, used=4, bias=True)),
        (
            "GLM-4.5-Air",
            106.85,
            13.42,
            Routing(experts=128, used=8, scores="sigmoid", selection_bias=True),
        ),
        ("Qwen1.5-MoE-A2.7B", 14.32, 2.69, Routing(experts=60, used=4, normalized=False)),
        ("Qwen3-30B-A3B", 30.53, 3.35, Routing(experts=128, used=8)),
        ("OLMoE-1B-7B-0924", 6.92, 1.28, Routing(experts=64, used=8, normalized=False)),
        ("Mixtral-8x7B-v0.1", 46.70, 12.88, Routing(experts=8, used=2)),
        ("granite-3.1-1b-a400m-base", 1.33, 0.43, Routing(experts=32, used=8)),
    ],
)
def test_released_models_have_their_size(
    tmp_path: Path, name: str, billions: float, used: float, routing: Routing
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
    config = read_config(tmp_path).config
    assert parameters(config) / 1e9 == pytest.approx(billions, abs=0.006)
    assert used_parameters(config) / 1e9 == pytest.approx(used, abs=0.006)
    assert config.layers[-1].experts == routing


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("GLM-4.5-Air", {"n_group": 8}, "n_group = 8"),
        ("gpt-oss-20b", {"swiglu_limit": 10.0}, "swiglu_limit = 10.0"),
        ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_settings_that_are_refused(
    tmp_path: Path, name: str, changes: Mapping[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RELEASED[name], **changes}))
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(tmp_path)
