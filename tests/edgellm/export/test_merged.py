"""Adapters merged into the weights of a bundle."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoint import exact
from tiny_adapters import ALPHA, merged, pairs_of, write_peft
from tiny_models import make

from edgellm.errors import ModelFormatError, OptionError
from edgellm.export import export
from edgellm.export.source_checkpoint import MergedCheckpoint
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.tensors import model_tensors
from edgellm.llm import load
from edgellm.store.prepare import prepare

TOKENS = np.random.default_rng(5).integers(3, 256, 20).tolist()


def test_weights_are_sums(tiny_model: Path, tmp_path: Path) -> None:
    """Of two adapters, one of them scaled."""
    first, second = (pairs_of(tiny_model, seed=seed, only=o) for seed, o in PARTS)
    whole = merged(tiny_model, tmp_path / "one", first, scale=ALPHA / 4)
    whole = merged(whole, tmp_path / "both", second, scale=0.5 * ALPHA / 4)
    adapters = [(write_peft(tmp_path / "a", first), 1.0), (write_peft(tmp_path / "b", second), 0.5)]
    found = MergedCheckpoint(open_checkpoint(tiny_model), adapters)
    expected = open_checkpoint(whole)
    for name in model_tensors(expected.config):
        np.testing.assert_allclose(
            found.tensor(name).float32(), expected.tensor(name).float32(), atol=2e-5, err_msg=name
        )
    np.testing.assert_allclose(exact(found, TOKENS)[1], exact(expected, TOKENS)[1], atol=1e-3)


def test_heads_of_latents_are_sums(tmp_path: Path) -> None:
    make("glm4_moe_lite", tmp_path / "model")
    pairs = pairs_of(tmp_path / "model", only=lambda name: ".self_attn." in name)
    whole = open_checkpoint(merged(tmp_path / "model", tmp_path / "all", pairs, scale=ALPHA / 4))
    adapter = write_peft(tmp_path / "adapter", pairs)
    found = MergedCheckpoint(open_checkpoint(tmp_path / "model"), [(adapter, 1.0)])
    for name in model_tensors(whole.config):
        np.testing.assert_allclose(
            found.tensor(name).float32(), whole.tensor(name).float32(), atol=2e-5, err_msg=name
        )


PARTS: list[tuple[int, Any]] = [(0, lambda _: True), (1, lambda name: "q_proj" in name)]


def test_a_bundle_computes_with_its_adapter(
    tiny_model: Path, tmp_path: Path, edgellm_home: Path
) -> None:
    pairs = pairs_of(tiny_model, size=1.0)
    adapter = write_peft(tmp_path / "adapter", pairs)
    whole = merged(tiny_model, tmp_path / "merged", pairs, scale=ALPHA / 4)
    names = ("f32",)
    bundles = [
        export(path, tmp_path / out, name="m", source="m", precisions=names, lora=lora)
        for path, out, lora in (
            (tiny_model, "with", [(adapter, 1.0)]),
            (whole, "whole", []),
            (tiny_model, "half", [(adapter, 0.5)]),
        )
    ]
    options: Any = {"precision": "f32", "decode": "reference", "kv_format": "f32", "ctx_size": 64}
    answers = []
    for bundle in bundles:
        with load(str(bundle.path), **options) as llm:
            answers.append(
                llm.generate(TOKENS, max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
            )
    assert answers[0].tokens == answers[1].tokens
    np.testing.assert_allclose(answers[0].logprobs, answers[1].logprobs, atol=1e-3)
    assert answers[2].logprobs != answers[0].logprobs
    assert len({bundle.manifest.source_sha256 for bundle in bundles}) == 3


def test_the_models_own_bundle_stays(tiny_model: Path, tmp_path: Path, edgellm_home: Path) -> None:
    adapter = write_peft(tmp_path / "adapter", pairs_of(tiny_model))
    with pytest.raises(OptionError, match="a folder of its own"):
        prepare(str(tiny_model), precisions=("packed",), lora=[(adapter, 1.0)])
    with pytest.raises(ModelFormatError, match="not an adapter"):
        prepare(
            str(tiny_model),
            precisions=("packed",),
            out=tmp_path / "out",
            lora=[(tmp_path / "nothing", 1.0)],
        )
    assert not (tmp_path / "out").exists()


def test_export_merges_what_the_command_line_names(
    cli: Callable[..., subprocess.CompletedProcess[str]],
    tiny_model: Path,
    tmp_path: Path,
    edgellm_home: Path,
) -> None:
    adapter, out = write_peft(tmp_path / "adapter", pairs_of(tiny_model)), tmp_path / "out"
    arguments = ["export", str(tiny_model), "-o", str(out), "--precisions", "packed"]
    found = cli(*arguments, "--lora", f"{adapter}:0.5")
    assert found.returncode == 0, found.stderr
    with load(str(out)) as llm:
        assert llm.engine.bundle.manifest.source.endswith(f" + {adapter}:0.5")
