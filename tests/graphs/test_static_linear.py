from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from edgellm.backends.thread_pool import session_options
from edgellm.graphs.builder import GraphBuilder, WeightFile
from edgellm.graphs.contract import Grid
from edgellm.graphs.linear import BlockRotatedLinear, Linear, StaticLinear, input_name, is_input
from edgellm.kernels import hadamard
from edgellm.quantize.basis import rotate_input_blocks, spreading
from edgellm.quantize.error import relative_error
from edgellm.quantize.weights import quantize_channels


def run(
    folder: Path, codes: np.ndarray, scale: np.ndarray, x: np.ndarray, grids: dict[str, Grid] | None
) -> dict[str, np.ndarray]:
    with WeightFile(folder) as file:
        layer = StaticLinear.store(file, "layers.0.up", codes, scale)
    return run_layer(folder, layer, len(codes), x, grids)


def run_layer(
    folder: Path, layer: Linear, outputs: int, x: np.ndarray, grids: dict[str, Grid] | None
) -> dict[str, np.ndarray]:
    graph = GraphBuilder("layer", grids=grids)
    value = layer.apply(graph, layer.activation(graph, graph.input("x", x.shape)))
    ir.save(graph.build({"y": (value, (x.shape[0], outputs))}), folder / "layer.onnx")
    options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(
        folder / "layer.onnx", options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"x": x}), strict=True))


@pytest.fixture
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (40, 96)).astype(np.int8)
    scale = rng.uniform(1e-3, 2e-3, 40).astype(np.float32)
    return codes, scale, rng.standard_normal((5, 96)).astype(np.float32)


def rounded(x: np.ndarray, grid: Grid) -> np.ndarray:
    half = 1 << grid.bits - 1
    return np.clip(np.rint(x.astype(np.float64) / grid.scale), -half, half - 1) * grid.scale


@pytest.mark.parametrize("bits", [8, 16])
def test_both_ends_are_on_their_grids(
    tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], bits: int
) -> None:
    """A grid that is too short clips."""
    codes, scale, x = arrays
    grids = {
        "layers.0.gate.input": Grid(2.0 / (1 << bits - 1), bits),
        "layers.0.up.output": Grid(2.0 / (1 << 15), 16),
    }
    found = run(tmp_path, codes, scale, x, grids)["y"]
    weight = codes.astype(np.float64) * scale[:, None]
    exact = rounded(x, grids["layers.0.gate.input"]) @ weight.T
    assert np.abs(exact).max() > 2.0
    expected = rounded(exact, grids["layers.0.up.output"])
    np.testing.assert_allclose(found, expected, atol=1.01 * grids["layers.0.up.output"].scale)


def test_observed_graph_is_exact_and_gives_both_ends(
    tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    codes, scale, x = arrays
    found = run(tmp_path, codes, scale, x, None)
    exact = x @ (codes * scale[:, None]).T
    np.testing.assert_allclose(found["y"], exact, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["layers.0.gate.input"], x)
    np.testing.assert_array_equal(found["layers.0.up.output"], found["y"])


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_rotated_input_gives_the_same_product(
    tmp_path: Path, mixed: bool, factor: float | None
) -> None:
    """An outlier is spread over its run of 16, or over all 48 inputs."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((24, 48)).astype(np.float32)
    x = rng.standard_normal((5, 48)).astype(np.float32)
    x[2, 7] = 100
    block, across = hadamard.matrix(16), spreading(3) if mixed else None
    codes, scale = quantize_channels(rotate_input_blocks(weight, block, across))
    with WeightFile(tmp_path) as file:
        layer = BlockRotatedLinear(
            StaticLinear.store(file, "layers.0.down", codes, scale),
            file.add("block", (block / (factor or 1)).astype(np.float32)),
            48,
            factor,
            None if across is None else file.add("across", across.astype(np.float32)),
        )
    found = run_layer(tmp_path, layer, 24, x, None)
    assert relative_error(x @ weight.T, found["y"]) < 0.01
    inputs = found["layers.0.down.input"]
    touched = np.flatnonzero(np.abs(inputs[2]) > 10)
    assert len(touched) > 16 if mixed else set(touched) == set(range(16))


def test_gate_and_up_share_an_input() -> None:
    assert input_name("layers.3.gate") == input_name("layers.3.up")
    assert is_input(input_name("layers.3.down"))
    assert not is_input("layers.3.down.output")
