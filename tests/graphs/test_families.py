"""Folders as transformers saves them: what they compute is what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoint import exact
from safetensors.numpy import load_file, save_file
from tiny_families import FAMILIES
from tiny_models import logits, make

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.architecture import architecture, supported
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_kinds import FULL, SLIDING

# Longer than any window.
TOKENS = np.random.default_rng(0).integers(3, 128, 40).tolist()


def test_every_family_is_here() -> None:
    assert set(supported()) <= set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """And a config with all its defaults is the same; what looks ahead, as embedders do, is not."""
    model = make(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    _, computed = exact(checkpoint, TOKENS)
    expected = logits(model, TOKENS)
    assert np.abs(expected).max() > 1
    assert np.square(computed - expected).mean() < 1e-10 * np.square(expected).mean()
    values = json.dumps(model.config.to_dict(), default=str)
    (tmp_path / "config.json").write_text(values)
    assert open_checkpoint(tmp_path).config == checkpoint.config
    change_config(tmp_path, is_causal=True)
    open_checkpoint(tmp_path)
    change_config(tmp_path, is_causal=False)
    with pytest.raises(UnsupportedModelError, match="is_causal = False is not supported"):
        open_checkpoint(tmp_path)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}}),
        ("qwen3", {"partial_rotary_factor": 0.5}),
        *((name, {}) for name in ("deepseek_v2", "deepseek_v2_groups")),
        *((name, {}) for name in ("deepseek_v3", "glm4_moe_lite")),
        ("glm4_moe", {"n_group": 3, "topk_group": 2}),
        ("smollm3", {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING]}),
    ],
)
def test_settings_count_as_in_transformers(
    tmp_path: Path, name: str, changes: Mapping[str, Any]
) -> None:
    model = make(name, tmp_path, **changes)
    _, computed = exact(open_checkpoint(tmp_path), TOKENS)
    np.testing.assert_allclose(computed, logits(model, TOKENS), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"layer_types": [FULL] * 4}) for name in ("llama", "mistral", "olmo2", "phi3")),
        ("llama", {"activation": "swiglu"}),
        ("hunyuan_v1_dense", {"enable_lm_head_fp32": True}),
    ],
)
def test_settings_that_say_what_is_computed_anyway(
    tmp_path: Path, name: str, changes: Mapping[str, Any]
) -> None:
    make(name, tmp_path)
    config = open_checkpoint(tmp_path).config
    change_config(tmp_path, **changes)
    assert open_checkpoint(tmp_path).config == config


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_head_beside_a_tied_embedding_counts_if_it_is_another(
    tmp_path: Path, wrapped: bool
) -> None:
    import transformers

    make("llama", tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    if wrapped:
        wrap(tmp_path, "mistral3", "model.language_model.", "")
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.config.tied_embedding
    np.testing.assert_allclose(exact(checkpoint, TOKENS)[1], logits(loaded, TOKENS), atol=1e-4)
    state = load_file(tmp_path / "model.safetensors")
    (embedding,) = (key for key in state if key.endswith("embed_tokens.weight"))
    save_file({**state, "lm_head.weight": state[embedding]}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config.tied_embedding


@pytest.mark.parametrize(
    ("name", "gguf", "missing"),
    [
        ("phimoe", False, "a router of another kind"),
        ("deepseek_v32", False, r"sparse attention \(DSA\)"),
        ("jamba", True, "recurrent layers"),
    ],
)
def test_architectures_that_need_more_say_of_what(name: str, gguf: bool, missing: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"'{name}' is not supported: it needs {missing}; s"
    ):
        architecture(name, gguf=gguf, origin="file")


def halves(rows: np.ndarray, head_dim: int, rotated: int) -> np.ndarray:
    """Of each head even rotated channels, then odd ones, then the rest."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    parts = heads[:, 0:rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]
    return np.concatenate(parts, axis=1).reshape(rows.shape)


State = Mapping[str, np.ndarray]


def rows_of_experts(state: State, name: str, first: int, step: int) -> np.ndarray:
    """Some outputs of all experts, which a folder of gpt-oss has as columns."""
    columns = state[f"{LAYER}mlp.experts.{name}"][:, :, first::step]
    return columns.swapaxes(1, 2).reshape(-1, columns.shape[1])


LAYER = "model.layers.1."
MADE: Mapping[str, Mapping[str, Callable[[State], np.ndarray]]] = {
    "qwen3": {
        "embedding": lambda s: s["model.embed_tokens.weight"],
        "head": lambda s: s["lm_head.weight"],
        "layers.1.q": lambda s: s[LAYER + "self_attn.q_proj.weight"],
        "layers.1.k_norm": lambda s: s[LAYER + "self_attn.k_norm.weight"],
        "layers.1.mlp_norm": lambda s: s[LAYER + "post_attention_layernorm.weight"],
    },
    "gemma2": {
        "final_norm": lambda s: s["model.norm.weight"] + 1,
        "layers.1.post_attention_norm": lambda s: s[LAYER + "post_attention_layernorm.weight"] + 1,
        "layers.1.mlp_norm": lambda s: s[LAYER + "pre_feedforward_layernorm.weight"] + 1,
        "layers.1.down": lambda s: s[LAYER + "mlp.down_proj.weight"],
    },
    "phi3": {
        "layers.1.q": lambda s: s[LAYER + "self_attn.qkv_proj.weight"][:64],
        "layers.1.k": lambda s: s[LAYER + "self_attn.qkv_proj.weight"][64:96],
        "layers.1.v": lambda s: s[LAYER + "self_attn.qkv_proj.weight"][96:],
        "layers.1.gate": lambda s: s[LAYER + "mlp.gate_up_proj.weight"][:96],
        "layers.1.up": lambda s: s[LAYER + "mlp.gate_up_proj.weight"][96:],
    },
    "granite": {
        "final_norm": lambda s: s["model.norm.weight"] / np.float32(2.5),
        "layers.1.o": lambda s: s[LAYER + "self_attn.o_proj.weight"],
    },
    "ernie4_5": {
        "layers.1.q": lambda s: halves(s[LAYER + "self_attn.q_proj.weight"], 32, 32),
        "layers.1.k_bias": lambda s: halves(s[LAYER + "self_attn.k_proj.bias"], 32, 32),
        "layers.1.v_bias": lambda s: s[LAYER + "self_attn.v_proj.bias"],
    },
    "glm4": {
        "layers.1.k": lambda s: halves(s[LAYER + "self_attn.k_proj.weight"], 32, 16),
        "layers.1.q_bias": lambda s: halves(s[LAYER + "self_attn.q_proj.bias"], 32, 16),
        "layers.1.post_mlp_norm": lambda s: s[LAYER + "post_mlp_layernorm.weight"],
    },
    "gpt_oss": {
        "layers.1.gate": lambda s: rows_of_experts(s, "gate_up_proj", 0, 2),
        "layers.1.up": lambda s: rows_of_experts(s, "gate_up_proj", 1, 2),
        "layers.1.down": lambda s: rows_of_experts(s, "down_proj", 0, 1),
        "layers.1.up_bias": lambda s: s[LAYER + "mlp.experts.gate_up_proj_bias"][:, 1::2].ravel(),
        "layers.1.down_bias": lambda s: s[LAYER + "mlp.experts.down_proj_bias"].ravel(),
        "layers.1.sinks": lambda s: s[LAYER + "self_attn.sinks"],
    },
    "starcoder2": {
        "layers.1.up_bias": lambda s: s[LAYER + "mlp.c_fc.bias"],
        "final_norm_bias": lambda s: s["model.norm.bias"],
    },
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_are_made_of_those_of_the_folder(tmp_path: Path, name: str) -> None:
    make(name, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for canonical, expected in MADE[name].items():
        np.testing.assert_array_equal(checkpoint.tensor(canonical).float32(), expected(state))


def attention_of(config: ModelConfig, name: str) -> list[Any]:
    return [getattr(layer.attention, name) for layer in config.layers]


def test_what_configs_become(tmp_path: Path) -> None:
    def config(name: str) -> ModelConfig:
        make(name, tmp_path)
        return open_checkpoint(tmp_path).config

    gemma = config("gemma3_text")
    assert attention_of(gemma, "window") == [8, 8, 8, 8, 8, None]
    assert attention_of(gemma, "rope") == [1, 1, 1, 1, 1, 0]
    assert gemma.ropes[0].inv_freq[0] == 1 / 4
    assert gemma.ropes[1].inv_freq[:2] == (1.0, pytest.approx(300 ** (-1 / 16)))
    assert gemma.tied_embedding
    assert config("gemma2").attention.scale == pytest.approx(24**-0.5)
    smollm = config("smollm3")
    assert attention_of(smollm, "rope") == [0, 0, 0, 1, 0]
    assert set(smollm.ropes[1].inv_freq) == {0.0}
    granite = config("granite")
    assert granite.embedding_scale == pytest.approx(3 / 0.4)
    assert granite.norm_eps == pytest.approx(1e-6 / 0.16)
    assert len(config("glm4").ropes[0].inv_freq) == 8
    # a longer context would have other frequencies, or queries scaled by their position
    assert config("phi3_longrope").context_length == 64
    assert config("ministral3").context_length == 64
    assert config("exaone4_windows").layers[3].attention.rope == 1
    assert config("starcoder2").norm == "layer"
    assert config("olmo3").layers[0].norms == "post"


def wrap(folder: Path, outer: str, prefix: str, head: str, **top: Any) -> None:
    """Make of a text model's folder one of a model that also sees."""
    values = json.loads((folder / "config.json").read_text())
    tied = values.pop("tie_word_embeddings", None)
    wrapper = {"model_type": outer, "text_config": values, "vision_config": {"mlp_bias": True}}
    if tied is not None:
        top = {"tie_word_embeddings": tied, **top}
    (folder / "config.json").write_text(json.dumps({**wrapper, **top}))
    state = load_file(folder / "model.safetensors")
    renamed = {
        prefix + key.removeprefix("model.") if key.startswith("model.") else head + key: value
        for key, value in state.items()
    }
    renamed["vision_tower.norm.weight"] = np.zeros(3, np.float32)
    save_file(renamed, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "outer", "prefix", "head"),
    [
        ("gemma3_text", "gemma3", "model.language_model.", ""),
        ("gemma3_text", "gemma3", "language_model.model.", "language_model."),
        ("gemma3n_text", "gemma3n", "model.language_model.", ""),
        ("gemma4_text", "gemma4", "model.language_model.", ""),
        ("gemma4_unified", "gemma4_unified", "model.language_model.", ""),
        ("ministral3", "mistral3", "model.language_model.", ""),
        ("mistral", "mistral3", "language_model.model.", "language_model."),
        ("llama", "smolvlm", "model.text_model.", ""),
    ],
)
def test_text_models_are_found_in_models_that_see(
    tmp_path: Path, name: str, outer: str, prefix: str, head: str
) -> None:
    model = make(name, tmp_path)
    alone = open_checkpoint(tmp_path).config
    wrap(tmp_path, outer, prefix, head)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == alone
    _, computed = exact(checkpoint, TOKENS)
    np.testing.assert_allclose(computed, logits(model, TOKENS), atol=1e-4)


def test_gemma_3n_without_a_scale_and_with_fewer_embeddings_for_layers(tmp_path: Path) -> None:
    """Tokens of images and sound have the first token's."""
    fewer = {"vocab_size_per_layer_input": 90, "altup_correct_scale": False}
    model = make("gemma3n_text", tmp_path, **fewer)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.layer_tokens == 90 <= max(TOKENS)
    np.testing.assert_allclose(exact(checkpoint, TOKENS)[1], logits(model, TOKENS), atol=5e-4)


def test_a_wrapper_that_says_nothing_has_the_head_that_is_there(tmp_path: Path) -> None:
    make("ministral3", tmp_path)
    wrap(tmp_path, "mistral3", "model.language_model.", "", tie_word_embeddings=None)
    assert not open_checkpoint(tmp_path).config.tied_embedding
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config.tied_embedding


def test_a_wrapper_has_quantized_weights(tmp_path: Path) -> None:
    make("ministral3", tmp_path)
    unknown = {"quant_method": "unknown"}
    wrap(tmp_path, "mistral3", "model.language_model.", "", quantization_config=unknown)
    with pytest.raises(UnsupportedModelError, match="quant_method 'unknown' is not read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, ModelFormatError, "1 entries.*4 layers"),
        ("gemma2", {"layer_types": ["chunked"] * 4}, UnsupportedModelError, "'chunked'"),
        ("gemma2", {"layer_types": [0] * 4}, ModelFormatError, "holds 0; expected str"),
        ("gemma2", {"sliding_window": None}, ModelFormatError, "sliding_window is missing"),
        ("gemma2", {"sliding_window": 0}, ModelFormatError, "window is 0; 1 to"),
        ("gemma2", {"query_pre_attn_scalar": 0}, ModelFormatError, "query_pre_attn_scalar"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, ModelFormatError, "softcap is -1"),
        ("gemma2", {"hidden_activation": "relu"}, UnsupportedModelError, "relu"),
        ("gemma3_text", {"use_bidirectional_attention": True}, UnsupportedModelError, "bidirect"),
        ("gemma3n_text", {"altup_active_idx": 1}, UnsupportedModelError, "active_idx = 1 is not"),
        ("gemma3n_text", {"altup_num_inputs": 9}, UnsupportedModelError, "9 residual streams; 2 t"),
        ("gemma3n_text", {"laurel_rank": 48}, UnsupportedModelError, "rank of laurel is 48"),
        ("gemma3n_text", {"activation_sparsity_pattern": [1.0] * 6}, ModelFormatError, "has 1.0"),
        ("gemma3n_text", {"vocab_size_per_layer_input": 129}, ModelFormatError, "129 tokens have"),
        ("mistral", {"sliding_window": 0}, ModelFormatError, "window is 0"),
        ("llama", {"num_key_value_heads": 3}, ModelFormatError, "multiple of"),
        ("llama", {"num_attention_heads": 0}, ModelFormatError, "heads is 0"),
        ("llama", {"residual_multiplier": 0.5}, UnsupportedModelError, "residual_multiplier"),
        ("llama", {"sliding_window": 64}, UnsupportedModelError, "sliding_window"),
        ("llama", {"num_local_experts": 8}, UnsupportedModelError, "num_local_experts"),
        ("llama", {"rope_parameters": {"rope_type": "cubic"}}, UnsupportedModelError, "cubic"),
        ("llama", {"rope_theta": 0, "rope_parameters": None}, ModelFormatError, "rope_theta. is 0"),
        ("llama", {"activation": "relu2"}, UnsupportedModelError, "activation = 'relu2'"),
        ("llama", {"layer_types": [SLIDING] * 64}, UnsupportedModelError, r"\.\.\.\] is not und"),
        ("smollm3", {"layer_types": [SLIDING] * 5}, ModelFormatError, "sliding_window is missing"),
        ("granite", {"residual_multiplier": 0.0}, ModelFormatError, "residual_multiplier"),
        ("granite", {"logits_scaling": 0}, ModelFormatError, "logits_scaling"),
        ("granite", {"norm_kind": "rms"}, UnsupportedModelError, "norm_kind = 'rms' is not under"),
        (
            "granitemoehybrid",
            {"layer_types": ["rwkv"] + ["attention"] * 3},
            UnsupportedModelError,
            "'rwkv'; supported are full_attention and attention and mamba",
        ),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, UnsupportedModelError, "no layer att"),
        ("granitemoehybrid_mamba", {"mamba_proj_bias": True}, UnsupportedModelError, "proj_bias"),
        ("granitemoehybrid_mamba", {"time_step_limit": [0, 1]}, UnsupportedModelError, "step_lim"),
        ("granitemoehybrid_mamba", {"mamba_d_head": 32}, UnsupportedModelError, "d_head = 32"),
        ("granitemoehybrid_mamba", {"mamba_n_heads": 3}, ModelFormatError, "128 chan.* 3 heads"),
        ("granitemoehybrid_mamba", {"mamba_n_heads": 0}, ModelFormatError, "for 0 heads"),
        ("granitemoehybrid_mamba", {"mamba_n_groups": 3}, ModelFormatError, "multiple of groups"),
        ("granitemoehybrid_mamba", {"mamba_d_conv": 1}, ModelFormatError, "taps is 1"),
        ("granitemoehybrid_mamba", {"mamba_d_state": 24}, UnsupportedModelError, "state_dim of Ma"),
        (
            "granitemoehybrid_mamba",
            {"mamba_d_head": "auto", "mamba_n_heads": 16},
            UnsupportedModelError,
            "head_dim of Mamba-2 is 8",
        ),
        ("granitemoehybrid", {"num_local_experts": 4}, ModelFormatError, "used is 0; 1 to"),
        ("smollm3", {"no_rope_layers": [1, 1]}, ModelFormatError, "2 entries.*5 layers"),
        ("smollm3", {"use_sliding_window": True}, UnsupportedModelError, "use_sliding_window"),
        ("exaone4", {"sliding_window": 8, "layer_types": None, "sliding_window_pattern": "GL"},
         UnsupportedModelError, "'GL'"),
        ("exaone4", {"sliding_window": 8, "layer_types": None, "sliding_window_pattern": -1},
         ModelFormatError, "-1 layers"),
        ("ministral3", {"rope_parameters": None}, ModelFormatError, "rope_parameters is missing"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "alpha": 1e300, "rope_theta": 1e4}},
            ModelFormatError,
            "alpha is 1e\\+300",
        ),
        ("granite", {"residual_multiplier": 1e-200}, ModelFormatError, "is inf"),
        ("gemma2", {"hidden_activation": "gelu"}, UnsupportedModelError, "hidden_activation"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ModelFormatError,
            "rope_parameters and rope_scaling differ",
        ),
        ("olmo2", {"rope_parameters": {"full_attention": {}}}, UnsupportedModelError, "full_att"),
        ("olmo3", {"rope_parameters": {"full_attention": 3}}, ModelFormatError, "is 3; expected"),
        ("phi3_longrope", {"num_attention_heads": 4}, ModelFormatError, "short_factor"),
        ("phi3", {"num_key_value_heads": 4}, ModelFormatError, "qkv_proj.*192 rows"),
        ("glm4", {"partial_rotary_factor": 0.1, "rope_parameters": None}, ModelFormatError, "RoPE"),
        ("hunyuan_v1_dense", {"use_cla": True}, UnsupportedModelError, "use_cla"),
        ("starcoder2", {"norm_type": "rms"}, UnsupportedModelError, "norm_type"),
        ("lfm2", {"conv_bias": True}, UnsupportedModelError, "conv_bias = True"),
        ("lfm2", {"conv_L_cache": 1}, ModelFormatError, "taps is 1; it must be 2 or more"),
        ("lfm2", {"conv_L_cache": 17}, ModelFormatError, "taps is 17; 1 to 16"),
        ("lfm2", {"layer_types": ["conv"] * 4}, UnsupportedModelError, "no layer attends"),
        ("lfm2", {"layer_types": ["conv"] * 3}, ModelFormatError, "3 entries.*4 layers"),
        (
            "lfm2",
            {"layer_types": ["conv", "mamba", FULL, FULL]},
            UnsupportedModelError,
            "'mamba'; supported are full_attention and conv",
        ),
        ("lfm2", {"conv_L_cache": 4}, ModelFormatError, r"conv has shape \[64, 3\].*\[64, 4\]"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    tmp_path: Path, name: str, changes: Mapping[str, Any], error: type, words: str
) -> None:
    make(name, tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(error, match=rf"(?s){tmp_path}.*{words}"):
        open_checkpoint(tmp_path)


def test_mistral_without_a_word_of_its_window_has_the_first_ones(tmp_path: Path) -> None:
    """As in transformers: v0.1 has 4096, and later ones say null."""
    make("mistral", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for change, window in (({"sliding_window": None}, None), ({}, 4096)):
        values.pop("sliding_window", None)
        path.write_text(json.dumps({**values, **change}))
        assert open_checkpoint(tmp_path).config.attention.window == window
