"""Hugging Face folders of a tiny Llama, with whatever tensors a test wants in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hf_weights import write_safetensors

from edgellm.errors import EdgeLLMError
from edgellm.graphs.checkpoint import open_checkpoint

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."
WEIGHTS = {
    "model.embed_tokens": (64, 128),
    "lm_head": (64, 128),
    LAYER + "self_attn.q_proj": (128, 128),
    LAYER + "self_attn.k_proj": (64, 128),
    LAYER + "self_attn.v_proj": (64, 128),
    LAYER + "self_attn.o_proj": (128, 128),
    LAYER + "mlp.gate_proj": (256, 128),
    LAYER + "mlp.up_proj": (256, 128),
    LAYER + "mlp.down_proj": (128, 256),
}
NORMS = (LAYER + "input_layernorm", LAYER + "post_attention_layernorm", "model.norm")


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Llama whose modules have the tensors of `replaced` in place of a weight.

    `config` is added to config.json. What is not replaced is bfloat16.
    """

    def write(replaced: Mapping[str, Mapping[str, np.ndarray]], config: Mapping[str, Any]) -> Path:
        rng = np.random.default_rng(3)
        tensors = {f"{name}.weight": np.ones(128, ml_dtypes.bfloat16) for name in NORMS}
        for module, shape in WEIGHTS.items():
            weight = (rng.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16)
            parts = replaced.get(module, {".weight": weight})
            tensors |= {module + suffix: array for suffix, array in parts.items()}
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        write_safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
        return folder

    return write


@pytest.fixture
def refuses(write_model: Callable[..., Path]) -> Callable[..., None]:
    """Asserts that a model as of `write_model` is refused, with words and the folder's name."""

    def check(
        replaced: Mapping[str, Mapping[str, np.ndarray]],
        config: Mapping[str, Any],
        error: type[EdgeLLMError],
        words: str,
    ) -> None:
        folder = write_model(replaced, config)
        with pytest.raises(error, match=words) as caught:
            open_checkpoint(folder)
        assert str(folder) in str(caught.value)

    return check
