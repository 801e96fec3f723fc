"""Gemma 4 as its files describe it: released settings, what is refused, vocabularies, memory."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_gguf import FILES, VOCABULARY, convert, with_vocabulary
from tiny_models import make

from edgellm.backends.selection import Selection
from edgellm.cache.groups import cache_groups
from edgellm.engine.memory import estimate
from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.export import export
from edgellm.export.tokenizer_import import _from_gguf
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import SharedExpert
from edgellm.graphs.layer_kinds import FULL, SLIDING
from edgellm.graphs.safetensors_checkpoint import read_config
from edgellm.graphs.tensors import model_tensors, parameters, used_parameters
from edgellm.kernels.experts import Routing
from edgellm.kernels.quantized import dequantize
from edgellm.options import EngineOptions
from edgellm.store.manifest import PACKED

E2B: dict[str, Any] = {
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "image_token_id": 258880,
    "vision_config": {"hidden_size": 768},
    "audio_config": {"attention_logit_cap": 50.0},
    "text_config": {
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
# The 31B model has no embeddings for each layer, and V is K in its full layers.
LARGE = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 4,
    "num_key_value_heads": 16,
    "num_attention_heads": 32,
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
}

# 26B-A4B.
EXPERTS = {
    **LARGE,
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
    "top_k_experts": 8,
    "use_double_wide_mlp": False,
}


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    values = {**E2B, "text_config": {**E2B["text_config"], **changes}}
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder).config


def test_e2b(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert parameters(config) / 1e9 == pytest.approx(4.63, abs=0.01)
    table = 35 * 256 * 262144
    assert model_tensors(config)["layer_embedding"].shape == (35 * 262144, 256)
    assert (parameters(config) - table) / 1e9 == pytest.approx(2.28, abs=0.01)
    sources = [layer.attention.kv_from for layer in config.layers]
    assert sources == [None] * 15 + ([13] * 4 + [14]) * 4
    assert [layer.mlp.intermediate for layer in config.layers] == [6144] * 15 + [12288] * 20
    assert Counter(len(group.layers) for group in cache_groups(config)) == {12: 1, 3: 1}
    full, local = config.ropes
    assert full.inv_freq[1] == pytest.approx(1e6 ** (-1 / 256))
    assert (len(full.inv_freq), np.count_nonzero(full.inv_freq)) == (256, 64)
    assert local.inv_freq[1] == pytest.approx(1e4 ** (-1 / 128))
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_k_is_v_in_the_full_layers_of_large_models(tmp_path: Path) -> None:
    config = config_of(tmp_path, **LARGE)
    assert [layer.attention.k_as_v for layer in config.layers] == ([False] * 4 + [True]) * 7
    assert [layer.attention.kv_heads for layer in config.layers] == ([16] * 4 + [4]) * 7
    names = model_tensors(config)
    assert "layers.3.v" in names
    assert not {"layers.4.v", "layer_embedding"} & names.keys()


def test_26b_a4b(tmp_path: Path) -> None:
    config = config_of(tmp_path, **EXPERTS)
    assert parameters(config) / 1e9 == pytest.approx(25.23, abs=0.006)
    assert used_parameters(config) / 1e9 == pytest.approx(3.82, abs=0.006)
    layer = config.layers[5]
    assert (layer.mlp.intermediate, layer.shared) == (
        704,
        SharedExpert(intermediate=2112, beside=True),
    )
    assert layer.experts == Routing(experts=128, used=8, scaled=True)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(UnsupportedModelError, match="norms on both sides"):
        replace(layer, norms="pre")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({**EXPERTS, "num_experts": None}, ModelFormatError, "'num_experts' is missing"),
        ({**EXPERTS, "top_k_experts": 129}, ModelFormatError, "uses 129 experts of 128"),
        ({**EXPERTS, "moe_intermediate_size": None}, ModelFormatError, "intermediate is 0"),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "'all' is not supp"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        ({"hidden_activation": "silu"}, UnsupportedModelError, "hidden_activation"),
        ({"vocab_size_per_layer_input": 99}, UnsupportedModelError, "vocab_size_per_layer"),
        ({"num_kv_shared_layers": 32}, ModelFormatError, "no layer before it has its window"),
        ({"num_kv_shared_layers": 36}, ModelFormatError, "36 layers share K and V"),
        ({"hidden_size_per_layer_input": 250}, UnsupportedModelError, "multiple of 32"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, UnsupportedModelError, "per_layer_conf"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        config_of(tmp_path, **changes)


def test_layers_that_share_must_be_alike(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    layer = config.layers[20]
    for changes in ({"kv_from": 14}, {"kv_from": 20}, {"kv_from": 16}, {"kv_from": -1}):
        wrong = replace(layer, mixer=replace(layer.attention, **changes))
        layers = (*config.layers[:20], wrong, *config.layers[21:])
        with pytest.raises(ModelFormatError, match=r"layers? 20"):
            replace(config, layers=layers)
    with pytest.raises(UnsupportedModelError, match="K has no norm"):
        replace(layer.attention, qk_norm="none")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_files_may_have_k_and_v_that_no_layer_reads(tmp_path: Path, kind: str) -> None:
    """As released folders and files have them; a table of 256 numbers is taken code by code."""
    arch, keys, _ = FILES["gemma4_text"]
    wide = {"hidden_size_per_layer_input": 256}

    def more(writer: gguf.GGUFWriter) -> None:
        keys(writer)
        writer.add_embedding_length_per_layer_input(256)
        for name, shape in (("k", (64, 64)), ("v", (64, 64)), ("k_norm", (32,))):
            writer.add_tensor(f"blk.3.attn_{name}.weight", np.ones(shape, np.float32))

    make("gemma4_text", tmp_path, **wide)
    stored = gguf.GGMLQuantizationType[kind]
    opened = open_checkpoint(convert(tmp_path, tmp_path / "m.gguf", arch, more, kind=stored))
    expected = open_checkpoint(tmp_path)
    assert opened.config.attentions == expected.config.attentions
    table, exact = (each.tensor("layer_embedding") for each in (opened, expected))
    assert table.shape == exact.shape == (128 * 6, 256)
    assert (table.quantized is None) == (kind == "F32")
    if table.quantized is not None:
        np.testing.assert_array_equal(dequantize(table.quantized()), table.float32())
    np.testing.assert_allclose(table.float32(), exact.float32(), atol=0.02)


def test_memory_has_no_table_that_is_read_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, keys, _ = FILES["gemma4_text"]
    make("gemma4_text", tmp_path, vocab_size=VOCABULARY)
    path = convert(tmp_path, tmp_path / "m.gguf", arch, with_vocabulary(keys))
    bundle = export(path, tmp_path / "bundle", name="tiny", source=str(path))
    selection = Selection(prefill="native", decode="native", policy="serial")

    def weights(tokens: int) -> int:
        monkeypatch.setattr("edgellm.engine.memory._DIFFERENT_TOKENS", tokens)
        return estimate(bundle, EngineOptions(), selection).weights

    whole = bundle.manifest.files["packed/weights.bin"].bytes
    panels, groups, size = bundle.precision(PACKED).arrays["layer_embedding"].shape
    assert weights(0) == whole - panels * groups * size
    assert weights(3) == weights(0) + 3 * (2 * groups * size + 4096)
    assert weights(10**6) == whole


# Token types of GGUF files: normal, unknown, control, user-defined, byte.
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.tokens": [
        *("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|tool_call>", "\n", "\n\n"),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *("▁", "a", "b", "▁a", "ab", "▁ab"),
    ],
    "tokenizer.ggml.token_type": [3, 3, 3, 2, 3, 3, 4, 1, 1, *[6] * 256, *[1] * 6],
    "tokenizer.ggml.merges": ["\n \n", "a b", "▁ ab", "▁ a"],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.ggml.add_bos_token": False,
}


def test_the_vocabulary_of_its_files() -> None:
    """llama.cpp's own vocabulary is in tests/edgellm/export/test_tokenizer_gguf.py."""
    imported = _from_gguf(METADATA, origin="file")
    assert imported.entry.add_bos  # whatever the file says
    assert imported.entry.bos == "<bos>"
    assert "<turn|>" in imported.entry.eos
    tokens = imported.tokenizer.encode("<|turn>ab ab\n\n a\n\n\né<|tool_call>").tokens
    assert tokens == [
        *("<|turn>", "ab", "▁ab", "\n\n", "▁a", "\n\n", "\n", "<0xC3>", "<0xA9>", "<|tool_call>"),
    ]
    ids = imported.tokenizer.encode("ab ab\n\n a\n\n\né<|tool_call>").ids
    assert imported.tokenizer.decode(ids) == "ab ab\n\n a\n\n\né<|tool_call>"
