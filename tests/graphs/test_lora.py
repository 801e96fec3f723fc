"""Adapters on disk: what they change is what merging them changes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from breadth import one_in
from safetensors.numpy import load_file, save_file
from tiny_adapters import (
    ALPHA,
    Pairs,
    merged,
    pairs_of,
    write_gguf_adapter,
    write_mlx,
    write_peft,
)
from tiny_families import FAMILIES
from tiny_gguf import FILES, convert, qwen35
from tiny_models import make

from edgellm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.lora import changes_of, open_adapter
from edgellm.graphs.tensors import model_tensors

# Whose GGUF files name another architecture than their folders.
RENAMED = ("olmo3", "deepseek_v3", "glm4_moe_lite")
# Parts of the names of modules that no adapter changes.
OTHERS = (".experts.", "expert_gate", ".per_layer_", ".altup", ".laurel.")
# The same in GGUF: heads of delta nets have another order, and other matrices are cut or renamed.
NOT_IN_GGUF = (*OTHERS, ".linear_attn.", ".kv_b_proj", "shared_mlp.")


def assert_changes(adapter: Path, base: Path, whole: Path, *, changed: int) -> None:
    """The adapter changes each matrix of `base` to that of `whole`, and no other one."""
    before, after = open_checkpoint(base), open_checkpoint(whole)
    layers, count = changes_of(open_adapter(adapter), before.config), 0
    for name, spec in model_tensors(before.config).items():
        if spec.role != "linear" or not name.startswith("layers."):
            continue
        _, layer, part = name.split(".")
        difference = after.tensor(name).float32() - before.tensor(name).float32()
        by = layers[int(layer)].get(part)
        count += by is not None
        found = np.zeros(()) if by is None else (by.b @ by.a).reshape(difference.shape)
        np.testing.assert_allclose(found, difference, atol=2e-5, err_msg=name)
    assert count == changed


def parts_of(config: ModelConfig, pairs: Pairs) -> int:
    """Linear layers that the adapter changes: those of a fused matrix count one by one."""
    fused = {"qkv_proj": 3, "gate_up_proj": 2, "input_linear": 2}
    fused |= dict.fromkeys(("in_proj_qkvz", "in_proj_ba", "kv_a_proj_with_mqa", "kv_b_proj"), 2)
    if config.model_type.startswith(("qwen3_5", "qwen3_next")):
        fused["q_proj"] = 2  # and the gate of attention's outputs
    return sum(fused.get(name.rpartition(".")[2], 1) for name in pairs)


def changeable(others: tuple[str, ...] = OTHERS) -> Callable[[str], bool]:
    return lambda module: not any(part in module for part in others)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make("llama", tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", one_in(6, FAMILIES))
def test_folders_of_peft_change_what_merging_changes(tmp_path: Path, name: str) -> None:
    base = tmp_path / "model"
    make(name, base)
    pairs = pairs_of(base, only=changeable())
    whole = merged(base, tmp_path / "merged", pairs, scale=ALPHA / 4)
    adapter = write_peft(tmp_path / "adapter", pairs)
    count = parts_of(open_checkpoint(base).config, pairs)
    assert_changes(adapter, base, whole, changed=count)


def test_factors_that_a_model_does_not_tell_are_not_taken_for_one(tmp_path: Path) -> None:
    """Of one in GGUF, or in a bundle that was made before they were kept."""
    make("falcon_h1", tmp_path / "model")
    pairs = pairs_of(tmp_path / "model", only=lambda name: ".k_proj" in name)
    adapter = open_adapter(write_peft(tmp_path / "adapter", pairs))
    config = replace(open_checkpoint(tmp_path / "model").config, settings={})
    words = "settings of the model's own folder, which an adapter's has not.*multiplier"
    with pytest.raises(ModelFormatError, match=words):
        changes_of(adapter, config)


@pytest.mark.parametrize("name", one_in(5, sorted({*FILES} - {*RENAMED})))
def test_gguf_adapters_change_what_merging_changes(tmp_path: Path, name: str) -> None:
    """Those of a folder's model too, whose rows of Q and K are in another order."""
    arch, keys, changes = FILES[name]
    base = tmp_path / "model"
    make(name, base, **changes)
    pairs = pairs_of(base, only=changeable(NOT_IN_GGUF))
    whole = merged(base, tmp_path / "merged", pairs, scale=ALPHA / 4)
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", base, pairs, arch)
    count = parts_of(open_checkpoint(base).config, pairs)
    assert_changes(adapter, base, whole, changed=count)
    files = [
        convert(folder, tmp_path / f"{folder.name}.gguf", arch, keys) for folder in (base, whole)
    ]
    assert_changes(adapter, *files, changed=count)
    # and a folder of PEFT for a GGUF file
    assert_changes(write_peft(tmp_path / "peft", pairs), *files, changed=count)


def test_a_mistral_folder_takes_an_adapter_that_says_llama(tmp_path: Path) -> None:
    base = tmp_path / "model"
    make("mistral", base)
    pairs = pairs_of(base)
    whole = merged(base, tmp_path / "merged", pairs, scale=ALPHA / 4)
    adapter = write_gguf_adapter(tmp_path / "a.gguf", base, pairs, gguf.MODEL_ARCH.LLAMA)
    assert_changes(adapter, base, whole, changed=len(pairs))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_gguf_adapters_are_read_in_their_types(tmp_path: Path, model: Path, kind: str) -> None:
    pairs = pairs_of(model, rank=32, only=lambda name: "q_proj" in name)
    stored = gguf.GGMLQuantizationType[kind]
    path = write_gguf_adapter(
        tmp_path / "a.gguf", model, pairs, gguf.MODEL_ARCH.LLAMA, kind=stored, alpha=0.0
    )
    changes = changes_of(open_adapter(path), open_checkpoint(model).config)
    a, _ = pairs["model.layers.2.self_attn.q_proj"]
    np.testing.assert_allclose(changes[2]["q"].a, a, atol=0.02)


def test_folders_of_mlx_are_transposed(tmp_path: Path, model: Path) -> None:
    pairs = pairs_of(model)
    whole = merged(model, tmp_path / "merged", pairs, scale=2.5)
    adapter = write_mlx(tmp_path / "adapter", pairs, scale=2.5)
    assert_changes(adapter, model, whole, changed=28)
    assert_changes(adapter / "adapters.safetensors", model, whole, changed=28)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"use_rslora": True}, ALPHA / 2),
        ({"alpha_pattern": {"q_proj": 3}}, 0.75),
        ({"alpha_pattern": {r"layers\.[0-9]+\.self_attn\.q_proj": 8.0}}, 2.0),
        ({"alpha_pattern": {"v_proj": 3}, "rank_pattern": {"k_proj": 7}}, ALPHA / 4),
        ({"r": 64, "rank_pattern": {"model.layers.1.self_attn.q_proj": 9, "q_proj": 4}}, None),
    ],
    ids=str,
)
def test_scales_are_those_of_peft(
    tmp_path: Path, model: Path, changes: dict[str, Any], scale: float | None
) -> None:
    pairs = pairs_of(model, only=lambda name: "q_proj" in name)
    adapter = write_peft(tmp_path / "adapter", pairs, **changes)
    if scale is None:
        with pytest.raises(ModelFormatError, match="is 9, and its matrices have 4"):
            open_adapter(adapter)
        return
    whole = merged(model, tmp_path / "merged", pairs, scale=scale)
    assert_changes(adapter, model, whole, changed=4)
    assert math.isclose(
        open_adapter(adapter).changes["model.layers.0.self_attn.q_proj.weight"].scale, scale
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora = True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"alora_invocation_tokens": [5, -6]}, "alora_invocation_tokens is [5, -6]; token ids"),
        ({"trainable_token_indices": [7]}, "trainable_token_indices = "),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters = "),
        ({"alpha_pattern": {"(a+)+b": 4}}, "a pattern without repeated groups"),
        ({"rank_pattern": {".*" * 9 + "X": 4}}, "three repetitions at most"),
        ({"alpha_pattern": {"(a": 4}}, "no pattern"),
        ({"lora_of_later_versions": 1}, "lora_of_later_versions = 1 is not understood"),
        ({"r": None}, "'r' is missing"),
        ({"lora_alpha": "much"}, "expected float"),
    ],
    ids=str,
)
def test_other_kinds_are_refused_by_name(
    tmp_path: Path, model: Path, changes: dict[str, Any], message: str
) -> None:
    pairs = pairs_of(model, only=lambda name: "q_proj" in name)
    adapter = write_peft(tmp_path / "adapter", pairs, **changes)
    with pytest.raises(EdgeLLMError, match=re.escape(message)) as raised:
        open_adapter(adapter)
    assert str(adapter) in str(raised.value)


def refused(adapter: Path, base: Path) -> str:
    with pytest.raises(EdgeLLMError) as raised:
        changes_of(open_adapter(adapter), open_checkpoint(base).config)
    assert str(adapter) in str(raised.value)
    return str(raised.value)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    make("llama", other, hidden_size=96, num_hidden_layers=6)
    only = lambda name: "layers.0." in name  # noqa: E731
    text = refused(write_peft(tmp_path / "a", pairs_of(other, only=only)), model)
    assert "for another model" in text
    assert "this model's layers.0." in text
    deep = pairs_of(other, only=lambda name: "layers.5." in name)
    text = refused(write_peft(tmp_path / "b", deep), model)
    assert "model.layers.5." in text
    assert "4 layers" in text
    pairs = {"model.embed_tokens": pairs_of(model)["model.layers.0.mlp.up_proj"]}
    assert "no linear layer" in refused(write_peft(tmp_path / "c", pairs), model)
    arch = gguf.MODEL_ARCH.QWEN2
    path = write_gguf_adapter(tmp_path / "d.gguf", model, pairs_of(model), arch)
    assert "for the architecture 'qwen2', and the model is 'llama'" in refused(path, model)


def test_experts_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "model"
    make("olmoe", base)
    pairs = pairs_of(base, only=lambda name: "experts.1." in name)
    assert "which is a matrix of an expert;" in refused(
        write_peft(tmp_path / "adapter", pairs), base
    )


def test_heads_in_another_order_are_refused(tmp_path: Path) -> None:
    """Those of delta nets: of a folder for a GGUF file, and the other way around."""
    base, arch = tmp_path / "model", gguf.MODEL_ARCH.QWEN35
    make("qwen3_5_text", base)
    file = convert(base, tmp_path / "model.gguf", arch, qwen35)
    pairs = pairs_of(base, only=lambda name: ".linear_attn.out_proj" in name)
    adapters = write_peft(tmp_path / "peft", pairs), tmp_path / "adapter.gguf"
    write_gguf_adapter(adapters[1], base, pairs, arch)
    for adapter, model in (*zip(adapters, (file, base), strict=True), (adapters[1], file)):
        assert "whose heads have another order in folders than in GGUF;" in refused(adapter, model)


def test_matrices_of_heads_that_files_keep_apart_are_refused(tmp_path: Path) -> None:
    base, (arch, _, changes) = tmp_path / "model", FILES["deepseek_v2"]
    make("deepseek_v2", base, **changes)
    pairs = pairs_of(base, only=lambda name: ".o_proj" in name)
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", base, pairs, arch)
    stored = open_adapter(adapter)
    ((name, change), *_) = stored.changes.items()
    moved = {name.replace("attn_output", "attn_k_b"): change}
    with pytest.raises(UnsupportedModelError, match="each head of latents by itself;"):
        changes_of(replace(stored, changes=moved), open_checkpoint(base).config)


def test_an_adapter_of_other_latents_is_refused(tmp_path: Path) -> None:
    base, other = tmp_path / "model", tmp_path / "other"
    make("deepseek_v2", base)
    make("deepseek_v2", other, kv_lora_rank=96)
    pairs = pairs_of(other, only=lambda name: ".kv_b_proj" in name)
    assert "for another model" in refused(write_peft(tmp_path / "adapter", pairs), base)


def test_what_is_neither_attention_nor_mlp_is_refused(tmp_path: Path) -> None:
    """By the name of the matrix, and not of a setting that no adapter has."""
    base = tmp_path / "model"
    make("gemma4_text", base)
    pairs = pairs_of(base, only=lambda name: "per_layer_projection" in name)
    message = refused(write_peft(tmp_path / "adapter", pairs), base)
    assert "changes model.layers.0.per_layer_projection.weight, which is neither" in message


def test_damaged_files_are_refused(tmp_path: Path, model: Path) -> None:
    pairs = pairs_of(model, only=lambda name: "q_proj" in name)
    for number, (text, edit) in enumerate(
        {
            "has not both": lambda t: t.pop(next(k for k in t if "lora_B" in k)),
            "no matrix of a LoRA": lambda t: t.update(extra=np.zeros(3, np.float32)),
            "its matrices have 5": lambda t: t.update(
                {k: np.ones((5, 64), np.float32) for k in t if "lora_A" in k}
            ),
            "not a number": lambda t: t.update({k: np.full_like(v, np.nan) for k, v in t.items()}),
        }.items()
    ):
        adapter = write_peft(tmp_path / str(number), pairs)
        tensors = load_file(adapter / "adapter_model.safetensors")
        edit(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")
        assert text in refused(adapter, model)
    adapter = write_peft(tmp_path / "flat", pairs)
    flat = {k: v.reshape(-1) for k, v in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(flat, adapter / "adapter_model.safetensors")
    assert "its matrices have" in refused(adapter, model)


def test_what_is_no_adapter_is_refused(tmp_path: Path, model: Path) -> None:
    assert "neither a folder nor a .gguf file" in refused(tmp_path / "nothing", model)
    assert "adapter_config.json is missing" in refused(model, model)
    assert "model.safetensors" not in refused(model, model)
    assert "cannot be read" in refused(tmp_path / ("a" * 300), model)
    pickled = tmp_path / "pickled"
    write_peft(pickled, pairs_of(model))
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    assert "is a pickle and is never opened" in refused(pickled, model)
    arch, keys, _ = FILES["llama"]
    whole = convert(model, tmp_path / "model.gguf", arch, keys)
    assert "is no adapter" in refused(whole, model)
    pairs = pairs_of(model)
    for key, value in (("adapter.type", "control"), ("general.type", "model")):
        path = write_gguf_adapter(tmp_path / "a.gguf", model, pairs, arch, keys={key: value})
        refused(path, model)
    adapter = write_mlx(tmp_path / "mlx", pairs, scale=1.0)
    values = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**values, "fine_tune_type": "dora"}))
    assert "fine_tune_type = 'dora'" in refused(adapter, model)
    with pytest.raises(UnsupportedModelError):
        open_checkpoint(write_gguf_adapter(tmp_path / "b.gguf", model, pairs, arch))
