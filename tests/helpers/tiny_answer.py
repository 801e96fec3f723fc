"""A random Llama and its answer, the same on all machines: `tiny_answer.py FOLDER` checks it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "families"))

# Their scores are 0.35 above the next best ones at least, so that no rounding changes them.
TOKENS = [81, 83, 102, 201, 229, 217, 269, 148, 213, 239, 150, 239]
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def make(folder: Path) -> Path:
    """A Hugging Face folder, made without their library."""
    from safetensors.numpy import save_file
    from tiny_models import save_tokenizer

    shapes = {"model.embed_tokens": (320, 96), "lm_head": (320, 96)}
    for layer in range(2):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        shapes |= {f"{attention}.q_proj": (96, 96), f"{attention}.o_proj": (96, 96)}
        shapes |= {f"{attention}.k_proj": (32, 96), f"{attention}.v_proj": (32, 96)}
        shapes |= {f"{mlp}.gate_proj": (160, 96), f"{mlp}.up_proj": (160, 96)}
        shapes |= {f"{mlp}.down_proj": (96, 160)}
    rng = np.random.default_rng(8)
    tensors = {
        f"{name}.weight": ((1.0 if name == "lm_head" else 0.1) * rng.standard_normal(shape)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")]
    tensors |= {f"{name}.weight": np.ones(96, np.float32) for name in [*norms, "model.norm"]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    save_tokenizer(folder)
    return folder


def answer(model: str) -> list[int]:
    """Tokens of a greedy answer."""
    from edgellm.llm import load

    llm = load(model, ctx_size=256)
    return list(llm.generate("a long way", temperature=0, max_tokens=12).tokens)


if __name__ == "__main__":
    found = answer(str(make(Path(sys.argv[1]))))
    print(found)
    assert found == TOKENS, TOKENS
