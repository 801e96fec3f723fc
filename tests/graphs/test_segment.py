"""Segments of every precision against the same arithmetic in numpy float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from random_checkpoint import CONFIGS, RandomCheckpoint, after_attention, normed, product

from edgellm.backends.thread_pool import session_options
from edgellm.export.precisions import PRECISIONS
from edgellm.export.weight_reader import WeightReader
from edgellm.graphs import contract
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint, open_checkpoint
from edgellm.graphs.linear import FloatLinear
from edgellm.graphs.segment import author_head, author_segment
from edgellm.graphs.tensors import mixer_inputs
from edgellm.store.precision_support import why_not

# Largest error over largest value that the precision allows on random layers.
TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "w8a8": 3e-2, "w4a16": 2.2e-1, "int4": 2e-1}


class NumpySegments:
    """The definition of a segment, in float64."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def qkv(self, layer: int, residual: np.ndarray) -> np.ndarray:
        x = normed(self.checkpoint, f"layers.{layer}.attention_norm", residual)
        names = mixer_inputs(self.checkpoint.config, layer)
        parts = [product(self.checkpoint, f"layers.{layer}.{part}", x) for part in names]
        return np.concatenate(parts, axis=-1)

    def run(self, index: int, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        if index == 0:
            residual = inputs[contract.X] * self.checkpoint.config.embedding_scale
            return [residual, self.qkv(0, residual)]
        attended, residual = inputs[contract.ATTENTION], inputs[contract.RESIDUAL]
        residual = after_attention(self.checkpoint, index - 1, attended, residual)
        if index == self.checkpoint.config.layer_count:
            return [normed(self.checkpoint, "final_norm", residual)]
        return [residual, self.qkv(index, residual)]

    def walk(self, x: np.ndarray, attention: np.ndarray) -> list[np.ndarray]:
        """See `walk` below."""
        outputs = self.run(0, {contract.X: x.astype(np.float64)})
        shown = [outputs[1]]
        for index in range(1, self.checkpoint.config.layer_count + 1):
            width = self.checkpoint.config.layers[index - 1].mixer.size
            inputs = {contract.ATTENTION: attention[:, :width], contract.RESIDUAL: outputs[0]}
            outputs = self.run(index, inputs)
            shown.append(outputs[-1])
        return shown


def sessions(folder: Path, precision: str, checkpoint: Checkpoint, chunk: int | None) -> list[Any]:
    folder.mkdir(exist_ok=True)
    basic_norms = PRECISIONS[precision].basic_norms and chunk is not None
    parts = contract.parts(checkpoint.config)
    with WeightFile(folder) as file:
        segments = list(PRECISIONS[precision].segments(WeightReader(checkpoint), file))
        for part in parts:
            model = author_segment(
                segments[part.index],
                checkpoint.config,
                chunk=chunk,
                half=part.half,
                basic_norms=basic_norms,
            )
            ir.save(model, folder / contract.part_file(part, chunk))
    return [
        ort.InferenceSession(
            folder / contract.part_file(part, chunk),
            session_options(),
            providers=["CPUExecutionProvider"],
        )
        for part in parts
    ]


def walk(found: list[Any], x: np.ndarray, attention: np.ndarray) -> list[np.ndarray]:
    """Run all segments with the same attention output each time, as wide as each reads it; what
    each shows outside."""
    outputs = found[0].run(None, {contract.X: x})
    shown = [outputs[1]]
    for session in found[1:]:
        (width,) = (i.shape[1] for i in session.get_inputs() if i.name == contract.ATTENTION)
        inputs = {contract.ATTENTION: attention[:, :width], contract.RESIDUAL: outputs[0]}
        outputs = session.run(None, inputs)
        shown.append(outputs[-1])
    return shown


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("chunk", [1, 32])
def test_matches_numpy(precision: str, chunk: int, tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model)
    rng = np.random.default_rng(chunk)
    x, attention = rng.standard_normal((2, chunk, 96)).astype(np.float32)
    expected = NumpySegments(checkpoint).walk(x, attention)
    for size in (chunk, None):
        for found, wanted in zip(
            walk(sessions(tmp_path / str(size), precision, checkpoint, size), x, attention),
            expected,
            strict=True,
        ):
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert error < TOLERANCE[precision]


@pytest.mark.parametrize(
    ("precision", "name"),
    [  # of each model in float, and in one of the others in turn
        pytest.param(precision, name, marks=[] if j in (0, 1 + i % 4) else pytest.mark.slow)
        for j, precision in enumerate(TOLERANCE)
        for i, (name, config) in enumerate(CONFIGS.items())
        if why_not(precision, config) is None and not config.has_experts
    ],
)
def test_every_part_matches_numpy(precision: str, name: str, tmp_path: Path) -> None:
    """Static graphs have their norms written out, others do not."""
    checkpoint = RandomCheckpoint(CONFIGS[name])
    x, attention = np.random.default_rng(1).standard_normal((2, 5, 96)).astype(np.float32)
    attention = np.concatenate([attention, attention[:, :32]], axis=1)  # for the widest layer
    expected = NumpySegments(checkpoint).walk(x, attention)
    for size in (5, None):
        ours = walk(sessions(tmp_path / str(size), precision, checkpoint, size), x, attention)
        for found, wanted in zip(ours, expected, strict=True):
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert error < TOLERANCE[precision]


@pytest.mark.parametrize("norms", ["pre", "sandwich"])
@pytest.mark.parametrize("precision", ["f32", "f16", "w4a16", "w8a8"])
def test_parts_around_experts(precision: str, norms: str, tmp_path: Path) -> None:
    """Rows that experts read, and the hidden states behind whatever they give."""
    layer = CONFIGS["experts"].layers[0]
    config = replace(CONFIGS["experts"], layers=(replace(layer, norms=norms),))
    if why_not(precision, config) is not None:
        pytest.skip("rotated residuals bear no norms behind experts")
    checkpoint, rng = RandomCheckpoint(config), np.random.default_rng(1)
    x, given = rng.standard_normal((2, 5, config.hidden_size)).astype(np.float32)
    attention = rng.standard_normal((5, layer.attention.size)).astype(np.float32)

    def added(norm: str, rows: np.ndarray) -> np.ndarray:
        return normed(checkpoint, f"layers.0.{norm}", rows)

    residual = x.astype(np.float64) * config.embedding_scale
    residual += added("post_attention_norm", product(checkpoint, "layers.0.o", attention))
    rows = normed(checkpoint, "layers.0.mlp_norm", residual)
    hidden = normed(checkpoint, "final_norm", residual + added("post_mlp_norm", given))
    for size in (5, None):
        first, router, behind = sessions(tmp_path / str(size), precision, checkpoint, size)
        before, _ = first.run(None, {contract.X: x})
        inputs = {contract.ATTENTION: attention, contract.RESIDUAL: before}
        between, found = router.run(None, inputs)
        inputs = {contract.EXPERTS: given, contract.RESIDUAL: between}
        (states,) = behind.run(None, inputs)
        for ours, wanted in ((found, rows), (states, hidden)):
            assert np.abs(ours - wanted).max() / np.abs(wanted).max() < TOLERANCE[precision]


@pytest.mark.parametrize("cap", [None, 3.0])
def test_head(cap: float | None, tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(replace(CONFIGS["llama"], logit_softcap=cap))
    head = checkpoint.tensor("head").float32()
    with WeightFile(tmp_path) as file:
        model = author_head(FloatLinear.store(file, "head", head), checkpoint.config)
        ir.save(model, tmp_path / contract.HEAD_FILE)
    hidden = 5 * np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
    path = tmp_path / contract.HEAD_FILE
    session = ort.InferenceSession(path, session_options(), providers=["CPUExecutionProvider"])
    expected = hidden.astype(np.float64) @ head.T
    if cap is not None:
        expected = cap * np.tanh(expected / cap)
    found = session.run(None, {contract.HIDDEN: hidden})[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("precision", TOLERANCE)
def test_poisoned_padding_never_shows(precision: str, tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model)
    found = sessions(tmp_path / precision, precision, checkpoint, 32)
    x, attention = np.random.default_rng(0).standard_normal((2, 32, 96)).astype(np.float32)
    clean = walk(found, x, attention)
    for poison in (np.nan, np.inf, 1e30):
        x[7:], attention[7:] = poison, poison
        for a, b in zip(clean, walk(found, x, attention), strict=True):
            np.testing.assert_array_equal(a[:7], b[:7])


def test_static_graphs_have_static_shapes(tiny_model: Path, tmp_path: Path) -> None:
    for session in sessions(tmp_path / "f32", "f32", open_checkpoint(tiny_model), 32):
        for value in (*session.get_inputs(), *session.get_outputs()):
            assert value.shape[0] == 32
            assert all(isinstance(n, int) for n in value.shape)


def test_graphs_hold_no_weights(tiny_model: Path, tmp_path: Path) -> None:
    sessions(tmp_path / "f32", "f32", open_checkpoint(tiny_model), 32)
    assert max(f.stat().st_size for f in (tmp_path / "f32").glob("*.onnx")) < 8192


def test_zero_rows_do_not_divide_by_zero(tiny_model: Path, tmp_path: Path) -> None:
    found = sessions(tmp_path / "w8a8", "w8a8", open_checkpoint(tiny_model), None)
    zeros = np.zeros((4, 96), np.float32)
    for output in walk(found, zeros, zeros):
        assert np.isfinite(output).all()
