"""Settings of released config.json files of models with shared experts, sinks and other routers."""

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
}


@pytest.mark.parametrize(
    ("name", "billions", "used", "routing"),
    [
        ("gpt-oss-20b", 20.91, 4.19, Routing(experts=32, used=4, bias=True)),
        (
            "GLM-4.5-Air",
            106.85,
            13.4,
            Routing(experts=128, used=8, scores="sigmoid", selection_bias=True),
        ),
        ("Qwen1.5-MoE-A2.7B", 14.32, 2.69, Routing(experts=60, used=4, normalized=False)),
        (
            "LFM2-8B-A1B",
            8.34,
            1.56,
            Routing(experts=32, used=4, scores="sigmoid", selection_bias=True),
        ),
    ],
)
def test_released_models_have_their_size(
    tmp_path: Path, name: str, billions: float, used: float, routing: Routing
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
    config = read_config(tmp_path).config
    assert parameters(config) / 1e9 == pytest.approx(billions, abs=0.01)
    assert used_parameters(config) / 1e9 == pytest.approx(used, abs=0.1)
    assert config.layers[-1].experts == routing


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("GLM-4.5-Air", {"n_group": 8}, "n_group = 8"),
        ("gpt-oss-20b", {"swiglu_limit": 10.0}, "swiglu_limit = 10.0"),
        ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": True}, "use_sliding_window"),
        ("LFM2-8B-A1B", {"conv_bias": True}, "conv_bias"),
    ],
)
def test_settings_that_are_refused(
    tmp_path: Path, name: str, changes: Mapping[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RELEASED[name], **changes}))
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(tmp_path)
