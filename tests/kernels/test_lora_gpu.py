"""Adapters in the Triton step: rows of one step with several of them, and with none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

import test_lora  # noqa: E402
from gpu_steps import step_on  # noqa: E402
from model_shapes import HYBRIDS, LATENTS, PARTS, SHAPES, Parts, Shape  # noqa: E402
from random_model import Model, View, span_of  # noqa: E402

from edgellm.kernels.lora import CHANGED, AdapterWeights, LowRank, pack_adapter  # noqa: E402
from edgellm.kernels.lora.gpu import Readers, StepAdapters  # noqa: E402
from edgellm.kernels.lora.reference import change  # noqa: E402
from edgellm.kernels.step import StepSpan, reference  # noqa: E402


@pytest.mark.parametrize(("inputs", "outputs"), [(96, (40, 16)), (576, (70,))])
@pytest.mark.parametrize("rank", [1, 8, 17, 64])
@pytest.mark.usefixtures("poisoned_tensors")
def test_changes_are_those_of_the_reference(
    triton_device: str, inputs: int, outputs: tuple[int, ...], rank: int
) -> None:
    """Two adapters and none, behind a norm, with biases, and rows in the order of spans."""
    rng = np.random.default_rng(rank)
    names = CHANGED[: len(outputs)]
    x = rng.standard_normal((37, inputs + 3), np.float32)
    norm, bias = rng.standard_normal(inputs, np.float32), rng.standard_normal(sum(outputs), "f4")

    def random(ranks: tuple[int, ...]) -> dict[str, LowRank]:
        return {
            name: LowRank(
                rng.standard_normal((r, inputs), np.float32), rng.standard_normal((n, r), "f4")
            )
            for name, n, r in zip(names, outputs, ranks, strict=False)
        }

    changes = [random((rank, 3)), random((5,)), {}]
    readers = Readers.of(1, dict(zip(names, outputs, strict=True)), triton_device, bias)
    adapters = StepAdapters([readers], rows=50, device=triton_device)
    packed = [None if not of else pack_adapter([{}, of]) for of in changes]
    runs = [(0, 18), (2, 3), (1, 1), (0, 15)]
    for weights in packed[:2]:
        adapters.load(weights)
    tiles = adapters.set([(packed[i], count) for i, count in runs])
    assert tiles == 5
    rows = torch.tensor(x, device=triton_device)[:, 3:]
    on = torch.tensor(norm, device=triton_device)
    found = adapters.of(tiles + 2).rows(readers, rows, norm=on, epsilon=1e-5).cpu().numpy()
    of_row = np.repeat([i for i, _ in runs], [count for _, count in runs])
    exact = x[:, 3:].astype(np.float64)
    exact = exact * norm / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5)
    for i, of in enumerate(changes):
        parts = [
            change(exact[of_row == i], of[name]) if name in of else np.zeros((sum(of_row == i), n))
            for name, n in zip(names, outputs, strict=True)
        ]
        expected = np.concatenate(parts, axis=1) + bias
        limit = 2e-6 if triton_device == "cpu" else 2e-3
        np.testing.assert_allclose(
            found[of_row == i], expected, atol=limit * np.abs(expected).max()
        )
    assert np.array_equal(found[of_row == 2], np.tile(bias, (3, 1)))


LAYERS = {
    "grouped queries": SHAPES[0],
    "everything": PARTS["everything"],
    "starcoder2": PARTS["starcoder2"],
    "olmo2": PARTS["olmo2"],
    "output gate": Shape(4, 2, 32, layers=2, parts=Parts(output_gate=True)),
    "experts and a shared one": test_lora.LAYERS["a shared expert"],
    "short_conv": HYBRIDS["short_conv"],
    "mamba2": HYBRIDS["mamba2 with groups"],
    "mamba2 beside": HYBRIDS["mamba2 beside attention"],
    "delta_net": HYBRIDS["delta_net"],
}


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    of_rows = np.abs(found - expected).mean(axis=1) / np.abs(expected).mean()
    return float(np.median(of_rows))


@pytest.mark.parametrize(
    ("name", "rank"), list(zip(LAYERS, (1, 8, 17, 64, 4, 3, 5, 6, 7, 2), strict=True))
)
@pytest.mark.usefixtures("poisoned_tensors")
def test_matches_the_reference(triton_device: str, name: str, rank: int) -> None:
    """Some rows, one more, and more than few."""
    model = Model(LAYERS[name])
    changes = test_lora.changes_of(model, rank)
    adapter = test_lora.packed(model, changes)
    expected, _ = reference.forward(
        model.weights, model.floats, model.tokens[:43], model.turns, format="f32", adapter=changes
    )
    views = model.views("f32")
    step, pools = step_on(model, views, triton_device)
    found = []
    for start, end in ((0, 7), (7, 8), (8, 43)):
        span = span_of(views, model.tokens[start:end], start, logit_rows=1)
        result = step.run([replace(span, adapter=adapter)])
        assert result is not None
        found.append(result[0])
    assert distance(np.concatenate(found), expected) < 0.03
