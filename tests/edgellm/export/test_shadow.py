"""Shadow outliers through the whole runtime: cut segments, host corrections, pruning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.schedule import POLICIES, Policy
from edgellm.backends.self_test import check_prompts, check_segments
from edgellm.backends.trace import TaskRecord
from edgellm.engine.one_sequence import Hooks, compute_prompt
from edgellm.export.calibrate import CalibrationOptions
from edgellm.graphs import contract
from edgellm.llm import LLM, load
from edgellm.quantize.calibration import ShadowLinear
from edgellm.store.bundle import open_bundle

Export = Callable[..., Path]
STATIC = "w8a8-qdq"


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Export, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[float], Path]:
    """Bundles whose grids clip much, with shadows for a share of the two layers."""
    folder = tmp_path_factory.mktemp("shadow")

    def path(share: float) -> Path:
        out = folder / f"share-{share}"
        options = CalibrationOptions(windows=8, window=32, percentile=98.0, shadow_share=share)
        precisions = ("f32", "int4", "packed", STATIC)
        return export_static(out, precisions=precisions, calibration=options)

    return path


def static(path: Path) -> LLM:
    return load(str(path), prefill="cpu", precision=STATIC, decode="reference")


def tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, 256, count).tolist()


def run(llm: LLM, count: int, policy: Policy = "serial") -> tuple[np.ndarray, list[TaskRecord]]:
    engine, records = llm.engine, list[TaskRecord]()
    assert isinstance(engine.prefill, ChunkedBackend)
    prefill = ChunkedBackend(
        engine.prefill.model, engine.decoder, engine.prefill.costs, policy=policy
    )
    sequence = engine.cache.sequence()
    logits = compute_prompt(prefill, tokens(count), sequence, Hooks(on_tasks=records.extend))
    sequence.truncate(0)
    return logits, records


def test_a_cut_segment_with_its_correction_has_no_clipping(
    bundle_path: Callable[[float], Path],
) -> None:
    """Both halves and the host's part against float64, on activations three times too large."""
    engine = static(bundle_path(1.0)).engine
    segments = engine.prefill.model.segments
    position = segments.parts.index(contract.Part(2, "down"))
    shadow, rng = segments.shadows[2], np.random.default_rng(0)
    activated = rng.standard_normal((32, engine.config.layers[0].mlp.intermediate)).astype(
        np.float32
    )
    activated *= 3 * 127 * shadow.scale / np.abs(activated).max()
    residual = rng.standard_normal((32, engine.config.hidden_size)).astype(np.float32)
    correction = shadow.correction(activated)
    assert correction is not None

    def product(codes: np.ndarray) -> np.ndarray:
        return codes * shadow.scale @ (shadow.codes * shadow.weight_scale.astype(np.float64))

    def hidden(added: np.ndarray) -> np.ndarray:
        """What the graph makes of a residual that already has `added`, but for the product."""
        inputs = {contract.ACTIVATED: activated, contract.RESIDUAL: residual + added}
        return segments.run(position, 32, inputs)[0]

    codes = np.rint(activated.astype(np.float64) / np.float32(shadow.scale))
    clipped = product(np.clip(codes, -128, 127))
    np.testing.assert_allclose(clipped + correction, product(codes), atol=1e-4)
    # a norm follows in the graph, so it is given the whole difference from outside instead
    exact = hidden((product(codes) - clipped).astype(np.float32))
    np.testing.assert_allclose(hidden(correction), exact, atol=1e-3)
    assert np.abs(hidden(np.zeros_like(residual)) - exact).max() > 0.05


@pytest.mark.slow
def test_shadows_bring_back_what_clipping_takes(bundle_path: Callable[[float], Path]) -> None:
    def hidden(llm: LLM) -> np.ndarray:
        rows: list[np.ndarray] = []
        hooks = Hooks(on_hidden=lambda chunk: rows.append(chunk.copy()))
        sequence = llm.engine.cache.sequence()
        compute_prompt(llm.engine.prefill, tokens(300), sequence, hooks)
        sequence.truncate(0)
        return np.concatenate(rows)

    paths = [bundle_path(share) for share in (0.0, 0.5, 1.0)]
    exact = hidden(load(str(paths[0]), prefill="cpu", precision="f32", decode="reference"))
    errors = [float(np.square(hidden(static(path)) - exact).mean()) for path in paths]
    assert errors[2] < 0.95 * errors[0]
    assert errors[2] < errors[1] < errors[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_schedule_gives_the_same_bits(
    bundle_path: Callable[[float], Path], policy: Policy
) -> None:
    llm = static(bundle_path(1.0))
    expected, _ = run(llm, 300)
    found, records = run(llm, 300, policy)
    np.testing.assert_array_equal(found, expected)
    names = {record.name: record.processor for record in records}
    assert names["segment 1 up"] == names["segment 1 down"] == "accelerator"
    assert names["shadow 0"] == "host"


def test_pruning_keeps_the_most_important_layers(bundle_path: Callable[[float], Path]) -> None:
    entries = [open_bundle(bundle_path(s)).precision(STATIC) for s in (0.0, 0.5, 1.0)]
    assert [len(entry.shadows) for entry in entries] == [0, 1, 2]
    assert [len(entry.cut_segments) for entry in entries] == [0, 1, 2]
    (kept,) = entries[1].shadows
    most = max(entries[2].shadows.items(), key=lambda item: item[1].importance)
    assert most == (kept, entries[1].shadows[kept])
    assert all(shadow.importance > 0 for shadow in entries[2].shadows.values())


def test_self_test_takes_halves_together(
    export_static: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grids that clip a fifth of all values: the host's part is most of it."""
    options = CalibrationOptions(
        windows=8, window=32, shadow_share=1.0, shadow_percentile=80.0, percentile=99.9
    )
    precisions = ("f32", "int4", "packed", STATIC)
    path = export_static(tmp_path / "bundle", precisions=precisions, calibration=options)
    engine = static(path).engine
    model = engine.prefill.model
    checks = [*check_segments(engine.bundle, model.segments)]
    checks += check_prompts(engine.bundle, model, engine.cache, engine.decoder)
    assert all(check.passed for check in checks)
    monkeypatch.setattr(ShadowLinear, "correction", lambda *_: None)
    without = check_segments(engine.bundle, model.segments)
    assert [check.passed for check in without] == 2 * [True, False, False]
