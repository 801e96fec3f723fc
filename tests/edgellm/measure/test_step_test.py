"""The self-test of models in packed weights: what is whole passes, what is damaged is named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import SourceError
from edgellm.backends.batch import StepBackend
from edgellm.backends.self_test import Check
from edgellm.engine.engine import Engine
from edgellm.graphs.contract import StoredArray
from edgellm.kernels.native import library
from edgellm.llm import load
from edgellm.measure.doctor import (
    check_layers,
    check_step,
    float_reference,
    prompt_limit,
    segment_limit,
)
from edgellm.store.bundle import Bundle, open_bundle
from edgellm.store.manifest import MANIFEST, PACKED, ImportSummary, imported
from edgellm.store.reference import Reference

needs_native = pytest.mark.skipif(library() is None, reason="the kernels were not built")


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Without graphs, so without a reference of its own."""
    out = tmp_path_factory.mktemp("step-test") / "bundle"
    return export_static(out, precisions=("packed",))


def checks_of(path: Path, backend: str = "native", *, limit: int | None = None) -> list[Check]:
    """All checks, of prompts no longer than `limit`; 0: those of layers alone."""
    engine: Engine = load(str(path), prefill=backend, decode=backend, ctx_size=256).engine
    assert isinstance(engine.prefill, StepBackend)
    model, summary = engine.prefill, imported(engine.bundle.manifest, PACKED)
    with float_reference(engine.bundle) as reference:
        reference = first_tokens(reference, limit)
        found = [*check_layers(engine.bundle, reference, model)]
        if limit != 0:
            found += check_step(reference, model, engine.cache, summary)
    assert engine.cache.used_blocks == 0
    return found


def first_tokens(reference: Reference, count: int | None) -> Reference:
    """The last hidden state, which the logits belong to, stays."""
    return replace(reference, tokens=reference.tokens[:count])


def failed(checks: Iterable[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def damaged(bundle: Bundle, copy: Path, array: StoredArray, begin: int, count: int) -> Path:
    """The same bundle with other bytes in an array, which the manifest says are right."""
    shutil.copytree(bundle.path, copy, copy_function=os.link)
    path = copy / array.file
    data = np.fromfile(path, np.uint8)
    data[array.offset + begin : array.offset + begin + count] ^= 0x5A
    path.unlink()
    data.tofile(path)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"][array.file]["sha256"] = hashlib.sha256(data).hexdigest()
    (copy / MANIFEST).unlink()
    (copy / MANIFEST).write_text(json.dumps(manifest))
    (copy / ".checked.json").unlink(missing_ok=True)
    return copy


@needs_native
def test_what_is_whole_passes(bundle_path: Path) -> None:
    checks = checks_of(bundle_path)
    assert [check.name for check in checks] == [
        *(f"segment {index} in packed weights" for index in range(3)),
        *(f"prompt of {count}" for count in (1, 2, 15, 16, 17, 127, 128, 129, 256)),
        "20 tokens one at a time",
        "head",
    ]
    assert failed(checks) == []
    assert all(check.error > 0 for check in checks)


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_triton_is_checked_as_well(bundle_path: Path, tmp_path: Path, triton_device: str) -> None:
    checks = checks_of(bundle_path, "triton", limit=2)
    assert [check.name for check in checks[3:]] == [
        "prompt of 1",
        "prompt of 2",
        "2 tokens one at a time",
        "head",
    ]
    assert failed(checks) == []
    assert all(check.error > 0 for check in checks)
    bundle = open_bundle(bundle_path)
    array = bundle.precision(PACKED).arrays["layers.0.down"]
    path = damaged(bundle, tmp_path / "damaged", array, 0, 4096)
    assert failed(checks_of(path, "triton", limit=0)) == ["segment 1 in packed weights"]


@needs_native
@pytest.mark.parametrize("kind", ["qwen2", "mistral", "qwen3", "gemma2", "olmo2", "starcoder2"])
def test_every_part_passes(
    export_static: Callable[..., Path], make_model: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    changes: dict[str, Any] = {"sliding_window": 16} if kind in ("mistral", "gemma2") else {}
    model = make_model(model_type=kind, **changes)
    path = export_static(tmp_path / "bundle", model=model, precisions=("packed",))
    assert failed(checks_of(path)) == []


@needs_native
@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("layers.0.q", 0),
        ("layers.0.o", 1),
        ("layers.0.gate", 1),
        ("layers.1.down", 2),
        ("layers.1.mlp_norm", 2),
        ("final_norm", 2),
    ],
)
def test_damage_is_found_and_named(
    bundle_path: Path, tmp_path: Path, name: str, segment: int
) -> None:
    bundle = open_bundle(bundle_path)
    path = damaged(bundle, tmp_path / "damaged", bundle.precision(PACKED).arrays[name], 0, 4096)
    found = failed(checks_of(path))
    assert f"segment {segment} in packed weights" in found
    segments = [check for check in found if check.startswith("segment")]
    # a norm is shorter than what is damaged, so what lies behind it is as well
    assert len(segments) == 1 or "norm" in name


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 14, 29])
def test_a_page_of_real_weights(smollm2: Bundle, tmp_path: Path, layer: int) -> None:
    """4 KB of down_proj's 553 KB, in a model whose weights are as in the file."""
    array = smollm2.precision(PACKED).arrays[f"layers.{layer}.down"]
    path = damaged(smollm2, tmp_path / "damaged", array, 200_000 // 64 * 64, 4096)
    bundle = open_bundle(path)
    engine = load(str(path), ctx_size=256).engine
    assert isinstance(engine.prefill, StepBackend)
    with float_reference(bundle) as reference:
        checks = check_layers(bundle, reference, engine.prefill)
        assert failed(checks) == [f"segment {layer + 1} in packed weights"]


@needs_native
def test_a_damaged_head_is_found(bundle_path: Path, tmp_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    array = bundle.precision(PACKED).arrays["head"]
    assert failed(checks_of(damaged(bundle, tmp_path / "x", array, 0, 2048))) == ["head"]


def test_garbage_is_never_allowed() -> None:
    """However large the error was when weights were rounded, it does not excuse garbage."""
    summary = ImportSummary(0, 1, 1.4, "head", 1.4)
    assert segment_limit(summary) <= 0.5
    assert prompt_limit(summary) <= 0.75


def test_a_reference_that_is_kept_is_taken(
    export_static: Callable[..., Path], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model()
    kept = open_bundle(export_static(tmp_path / "kept", model=model, precisions=("f32", "packed")))
    without = open_bundle(export_static(tmp_path / "bundle", model=model, precisions=("packed",)))
    with float_reference(kept) as first, float_reference(without) as second:
        assert first.tokens == second.tokens
        np.testing.assert_array_equal(first.hidden, second.hidden)
    shutil.rmtree(model)
    with float_reference(kept) as reference:
        assert len(reference.tokens) == 257
    context = float_reference(without)
    with pytest.raises(SourceError, match="put the file back"):
        context.__enter__()


@needs_native
def test_doctor_checks_the_native_kernels(
    bundle_path: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    native = ("--prefill", "native", "--decode", "native")
    found = cli("doctor", str(bundle_path), *native, "--verbose")
    assert found.returncode == 0, found.stdout
    assert "packed on native\nok    segment 0 in packed weights: error 0." in found.stdout
    assert found.stdout.endswith("all 14 checks passed\n")
    bundle = open_bundle(bundle_path)
    array = bundle.precision(PACKED).arrays["layers.1.up"]
    path = damaged(bundle, tmp_path / "damaged", array, 0, 4096)
    found = cli("doctor", str(path))
    assert found.returncode == 1
    assert "WRONG segment 2 in packed weights" in found.stdout
    assert "checks failed: segment 2 in packed weights" in found.stdout
