"""The text in float32 that a bundle keeps, against Hugging Face transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import edgellm.export.rotated
from edgellm import ExportError, ModelFormatError
from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.export import export
from edgellm.graphs import contract
from edgellm.graphs.contract import HOST_TOKENS
from edgellm.quantize.weights import quantize_channels
from edgellm.store.bundle import Bundle, open_bundle
from edgellm.store.reference import PROMPT, ROWS, Reference, open_reference

CHANGES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "sliding": {"model_type": "mistral", "sliding_window": 16},
    "short": {"max_position_embeddings": 40},
    "shorter": {"max_position_embeddings": 9},
}


def bundle_of(model: Path, out: Path, *precisions: str) -> Bundle:
    sizes = None if precisions == ("packed",) else (16, 32)
    return export(model, out, name="tiny", source="tiny", precisions=precisions, chunk_sizes=sizes)


def reference_of(bundle: Bundle) -> Reference:
    return open_reference(bundle.path, bundle.config, bundle.manifest.reference)


@pytest.mark.parametrize("changes", CHANGES)
def test_against_transformers(
    make_model: Callable[..., Path], tmp_path: Path, changes: str
) -> None:
    path = make_model(**CHANGES[changes])
    reference = reference_of(bundle_of(path, tmp_path / "bundle", "f32"))
    count = {"short": 40, "shorter": 9}.get(changes, HOST_TOKENS + 2 * 32)
    assert len(reference.tokens) == count
    judge = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    attended: list[torch.Tensor] = []
    for layer in judge.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, x: attended.append(x[0]))
    with torch.no_grad():
        found = judge(torch.tensor([reference.tokens]), output_hidden_states=True)
    kept = slice(HOST_TOKENS, HOST_TOKENS + ROWS)
    states = [state[0].numpy() for state in found.hidden_states]

    def same(ours: np.ndarray, theirs: np.ndarray) -> None:
        np.testing.assert_allclose(ours, theirs, atol=2e-4)

    same(reference.embedded, states[0])
    same(reference.hidden, states[-1])
    same(reference.logits, found.logits[0, -1:].numpy())
    first, second, last = reference.segments
    same(second.inputs[contract.RESIDUAL], states[0][kept])
    same(last.inputs[contract.RESIDUAL], states[1][kept])
    for rows, attention in zip((second, last), attended, strict=True):
        same(rows.inputs[contract.ATTENTION], attention[0].numpy()[kept])
    same(last.outputs[contract.HIDDEN], states[-1][kept])
    assert first.outputs.keys() == {contract.RESIDUAL_OUT, contract.QKV}
    assert all(len(rows) == HOST_TOKENS for rows in reference.host_qkv)


def test_errors_of_precisions(tiny_model: Path, tmp_path: Path) -> None:
    bundle = bundle_of(tiny_model, tmp_path / "bundle", "f32", "f16", "w8a8", "w4a16", "int4")
    errors = {name: entry.errors for name, entry in bundle.manifest.precisions.items()}
    assert errors.pop("int4") == {}
    assert all(found.keys() == {"000", "001", "002", PROMPT} for found in errors.values())
    worst = {name: max(found.values()) for name, found in errors.items()}
    assert worst["f32"] < 1e-4 < worst["f16"] < 5e-3 < worst["w8a8"]
    assert worst["w8a8"] < (0.1 if int8_products_are_exact() else 0.5)
    assert 0.1 < worst["w4a16"] < 0.5


def test_a_model_that_would_overflow(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    for name in ("gate", "up"):
        weights[f"model.layers.1.mlp.{name}_proj.weight"] *= 1e30
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"mlp\.gate_proj\.weight holds a value .* 65504"):
        bundle_of(model, tmp_path / "bundle", "w8a8")
    assert not (tmp_path / "bundle").exists()


def test_a_precision_that_overflows(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes, scale = quantize_channels(weight)
        return codes, scale * np.float32(np.nan if weight.shape[1] == 160 else 1)  # down_proj

    monkeypatch.setattr(edgellm.export.rotated, "quantize_channels", quantize)
    with pytest.raises(ExportError, match="w8a8: segment 1 gives a value that is infinite"):
        bundle_of(tiny_model, tmp_path / "bundle", "f32", "w8a8")
    assert not (tmp_path / "bundle").exists()


def test_a_precision_that_is_added_is_measured_by_the_same_text(
    tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    assert bundle_of(tiny_model, out, "packed").manifest.reference == {}
    first = bundle_of(tiny_model, out, "packed", "f32")
    before = (out / "reference" / "weights.bin").stat()
    second = bundle_of(tiny_model, out, "f32", "w8a8")
    assert second.manifest.reference == first.manifest.reference
    assert (out / "reference" / "weights.bin").stat() == before
    assert second.precision("w8a8").errors[PROMPT] > 0
    assert open_bundle(out, verify=True).manifest == second.manifest
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [
        "f32",
        "head-f32",
        "head-int8",
        "keys",
        "packed",
        "reference",
        "w8a8",
    ]
