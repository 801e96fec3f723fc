"""Hugging Face folders of a tiny Llama, with whatever tensors a test wants in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

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
# The names that the format has for types (github.com/huggingface/safetensors).
NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "uint32": "U32",
    "int8": "I8",
    "uint8": "U8",
}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A file of tensors, also of types that the library cannot write from numpy."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        content = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def save_tensors() -> Callable[[Path, Mapping[str, np.ndarray]], None]:
    return write_safetensors


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
