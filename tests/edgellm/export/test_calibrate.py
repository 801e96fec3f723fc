from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from random_checkpoint import CONFIGS, RandomCheckpoint, after_attention, mix, normed

import edgellm.export.calibrate
from edgellm import ExportError, OptionError
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import Costs
from edgellm.backends.providers import open_session
from edgellm.backends.thread_pool import session_options
from edgellm.engine.one_sequence import compute_prompt
from edgellm.export.calibrate import CalibrationOptions, Calibrator, Rounding
from edgellm.export.precisions import PRECISIONS
from edgellm.export.weight_reader import WeightReader
from edgellm.export.window_attention import WindowAttention
from edgellm.graphs import contract
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.contract import HOST_TOKENS
from edgellm.graphs.segment import Segment, author_segment
from edgellm.llm import LLM, load
from edgellm.measure.perplexity import perplexity
from edgellm.quantize.basis import random_rotation
from edgellm.quantize.weights import quantize_channels
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import MANIFEST

STATIC = "w8a16-qdq"
Export = Callable[..., Path]
Prefilled = Callable[[LLM, list[int]], tuple[np.ndarray, dict[str, int]]]


@pytest.fixture(scope="module")
def bundle_path(export_static: Export, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_static(tmp_path_factory.mktemp("static") / "bundle")


@pytest.fixture(scope="module")
def float_llm(bundle_path: Path) -> LLM:
    return load(str(bundle_path), precision="f32", decode="reference")


@pytest.fixture(scope="module")
def static_llm(bundle_path: Path) -> LLM:
    return load(str(bundle_path), prefill="cpu", precision=STATIC, decode="reference")


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 34, 64, 65, 128, 129, 130, 257])
def test_close_to_float_at_every_edge_of_a_chunk(
    float_llm: LLM, static_llm: LLM, logits_and_places: Prefilled, count: int
) -> None:
    """The first token is left to the host; int8 weights are as far off for every count."""
    tokens = np.random.default_rng(count).integers(0, 256, count).tolist()
    exact, _ = logits_and_places(float_llm, tokens)
    found, places = logits_and_places(static_llm, tokens)
    assert places == {"reference": 1, **({"cpu": count - 1} if count > 1 else {})}
    assert np.abs(found - exact).max() < 0.08 * np.abs(exact).max()


@pytest.mark.parametrize("count", [2, 8, 33, 40, 170])
def test_the_first_token_and_a_short_tail_are_both_the_hosts(static_llm: LLM, count: int) -> None:
    """Nothing is left out where two pieces of the host come one after the other."""
    tokens = np.random.default_rng(count).integers(0, 256, count).tolist()
    engine = static_llm.engine
    assert isinstance(engine.prefill, ChunkedBackend)
    results = []
    for costs in (Costs({32: (1.0,), 128: (3.0,)}, {1: (0.001,)}), engine.prefill.costs):
        sequence = engine.cache.sequence()
        prefill = ChunkedBackend(engine.prefill.model, engine.decoder, costs)
        results.append(compute_prompt(prefill, tokens, sequence))
        assert sequence.tokens == tokens
        sequence.truncate(0)
    assert np.abs(results[0] - results[1]).max() < 0.08 * np.abs(results[1]).max()


@pytest.mark.slow
def test_two_calibrations_are_the_same_and_seeds_differ(
    export_static: Export, tmp_path: Path
) -> None:
    def graphs(name: str, seed: int) -> tuple[bytes, dict[str, Any]]:
        options = CalibrationOptions(windows=2, window=16, seed=seed)
        out = export_static(tmp_path / name, precisions=(STATIC,), calibration=options)
        entry = json.loads((out / MANIFEST).read_text())["precisions"][STATIC]
        return (out / STATIC / "001.c32.onnx").read_bytes(), entry

    first, entry = graphs("a", 0)
    assert entry["host_tokens"] == 1
    assert entry["calibration"]["windows"] == 2
    assert entry["calibration"]["text"] == "default"
    assert graphs("b", 0) == (first, entry)
    assert graphs("c", 1)[0] != first


def test_nothing_of_the_calibration_run_is_left(bundle_path: Path) -> None:
    folders = {path.name for path in bundle_path.iterdir() if path.is_dir()}
    heads = {"head-f32", "head-int8"}
    assert folders == {"f32", "int4", "packed", STATIC, *heads, "keys", "reference"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "best"}, "minmax, percentile, mse"),
        ({"rounding": "up"}, "gptq, nearest"),
        ({"windows": 0}, "windows is 0"),
        ({"window": 1}, "2 or more"),
        ({"percentile": 0.0}, "percentile is 0"),
        ({"shadow_percentile": 101.0}, "shadow percentile is 101"),
        ({"shadow_share": 1.5}, "allowed is 0 to 1"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        CalibrationOptions(**options)


@pytest.mark.parametrize("text", ["", "Too short.", "Long enough for a few windows. " * 20])
def test_text_that_is_too_short(export_static: Export, tmp_path: Path, text: str) -> None:
    with pytest.raises(OptionError, match=r"calibration text has \d+ tokens"):
        export_static(tmp_path / "bundle", calibration=CalibrationOptions(text=text, window=64))
    assert not (tmp_path / "bundle").exists()


def test_values_that_overflow_are_noticed(
    export_static: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(WindowAttention):
        def __call__(self, layer: int, qkv: np.ndarray) -> np.ndarray:
            return super().__call__(layer, qkv) * np.inf

    monkeypatch.setattr(edgellm.export.calibrate, "WindowAttention", Endless)
    with pytest.raises(ExportError, match="calibration: segment 1 gives a value that is infinite"):
        export_static(tmp_path / "bundle", precisions=(STATIC,))
    assert not (tmp_path / "bundle").exists()


def test_weights_are_rounded_for_the_inputs_that_were_seen(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Second moments of the first layer's inputs, the host's tokens left out, against float64."""
    checkpoint = open_checkpoint(tiny_model)
    config = checkpoint.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (19, 12))
    embedded = checkpoint.tensor("embedding").float32()[tokens]
    found: dict[str, np.ndarray] = {}

    class Noted(Calibrator):
        def observe(self, segment: Segment) -> dict[str, np.ndarray]:
            moments = super().observe(segment)
            found.update(moments)
            return moments

    options = CalibrationOptions(windows=19, window=12)
    (tmp_path / "unrounded").mkdir()
    with WeightFile(tmp_path) as file, WeightFile(tmp_path / "unrounded") as unrounded:
        noted = Noted(checkpoint, embedded, options, bits=16, file=unrounded)
        segments = PRECISIONS[STATIC].segments
        assert segments is not None
        assert len(list(segments(WeightReader(checkpoint), file, noted))) == config.layer_count + 1
        stored = file.arrays
    x = embedded[:, HOST_TOKENS:].reshape(-1, config.hidden_size).astype(np.float64)
    x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True) + config.norm_eps)
    x = x @ random_rotation(config.hidden_size, seed=0)
    np.testing.assert_allclose(found["layers.0.qk.input"], x.T @ x / len(x), atol=1e-4)

    def array(name: str) -> np.ndarray:
        where = stored[name]
        data = (tmp_path / Path(where.file).name).read_bytes()[where.offset :]
        return np.frombuffer(data, where.dtype, math.prod(where.shape)).reshape(where.shape)

    norm = checkpoint.tensor("layers.0.attention_norm").float32()
    exact = np.concatenate([checkpoint.tensor(f"layers.0.{n}").float32() * norm for n in "qk"])
    exact = (exact @ random_rotation(config.hidden_size, seed=0)).astype(np.float32)
    rounded = array("layers.0.qk").T * array("layers.0.qk.scale")[:, None]
    codes, scale = quantize_channels(exact)
    ours, nearest = (x @ (w - exact).T for w in (rounded, codes * scale[:, None]))
    assert np.linalg.norm(ours) < np.linalg.norm(nearest)


@pytest.mark.parametrize("name", ["biases", "gelu", "ungated", "gemma", "head_norms"])
@pytest.mark.parametrize("precision", [STATIC, "w8a8-qdq"])
def test_every_part_that_can_be_rotated(precision: str, name: str, tmp_path: Path) -> None:
    """Graphs with static scales against float64, on the text that they are calibrated on."""
    checkpoint = RandomCheckpoint(CONFIGS[name])
    config = checkpoint.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (9, 16))
    embedded = checkpoint.tensor("embedding").float32()[tokens]
    options = CalibrationOptions(windows=9, window=16, shadow_share=0, rounding="nearest")
    (tmp_path / "unrounded").mkdir()
    residual = embedded[0].astype(np.float64) * config.embedding_scale
    inputs, attended = {contract.X: embedded[0]}, np.zeros((16, config.attention.size))
    authors = PRECISIONS[precision].segments
    assert authors is not None
    with WeightFile(tmp_path) as file, WeightFile(tmp_path / "unrounded") as unrounded:
        calibrator = Calibrator(checkpoint, embedded, options, bits=16, file=unrounded)
        segments = list(authors(WeightReader(checkpoint), file, calibrator))
    for segment in segments:
        path = tmp_path / contract.part_file(contract.Part(segment.index), 16)
        grids = calibrator.grids({})
        ir.save(author_segment(segment, config, chunk=16, grids=grids), path)
        session = ort.InferenceSession(path, session_options(), providers=["CPUExecutionProvider"])
        outputs = session.run(None, inputs)
        if segment.index:
            residual = after_attention(checkpoint, segment.index - 1, attended, residual)
        if segment.index < config.layer_count:
            attended = mix(checkpoint, segment.index, residual, {})
            inputs = {
                contract.ATTENTION: attended.astype(np.float32),
                contract.RESIDUAL: outputs[0],
            }
    expected = normed(checkpoint, "final_norm", residual)
    error = np.abs(outputs[0] - expected)[HOST_TOKENS:].max() / np.abs(expected).max()
    assert error < 0.05


def test_16_bits_are_computed_as_such(bundle_path: Path) -> None:
    """ONNX Runtime's graph optimizations change nothing but the order of sums."""
    path = bundle_path / STATIC / "001.c32.onnx"
    plain = session_options()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    exact = ort.InferenceSession(path, plain, providers=["CPUExecutionProvider"])
    session, _ = open_session(path, provider="cpu")
    rng = np.random.default_rng(0)
    inputs = {x.name: rng.standard_normal(x.shape).astype(np.float32) for x in session.get_inputs()}
    for found, expected in zip(session.run(None, inputs), exact.run(None, inputs), strict=True):
        assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected)


def test_weights_to_the_nearest(export_static: Export, tmp_path: Path) -> None:
    def exported(rounding: Rounding) -> tuple[dict[str, Any], bytes]:
        options = CalibrationOptions(windows=2, window=16, rounding=rounding)
        out = export_static(tmp_path / rounding, precisions=(STATIC,), calibration=options)
        entry = json.loads((out / MANIFEST).read_text())["precisions"][STATIC]
        assert entry["calibration"]["rounding"] == rounding
        return entry, (out / STATIC / "weights.bin").read_bytes()

    (nearest, some), (gptq, other) = exported("nearest"), exported("gptq")
    assert some != other
    errors = [entry["import_report"]["mean_relative_error"] for entry in (nearest, gptq)]
    assert errors[0] < errors[1]  # of weights, not of products


def test_real_model_loses_nothing(smollm2_all: Bundle, reference_llm: LLM) -> None:
    """16-bit activations on text that was not calibrated on; -0.12 % over 4,088 tokens of it."""
    import argparse
    import inspect

    text = inspect.getsource(argparse)
    exact = perplexity(reference_llm.engine, text, max_windows=3)
    static = load(str(smollm2_all.path), prefill="cpu", precision=STATIC).engine
    found = perplexity(static, text, max_windows=3)
    assert found.perplexity == pytest.approx(exact.perplexity, rel=1e-2)
