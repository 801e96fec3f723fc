from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

from random_weights import random_weight  # noqa: E402

from edgellm.kernels.linear import PackedWeights, gpu, pack_weight, reference, rows_of  # noqa: E402
from edgellm.kernels.quantized import KINDS, dequantize  # noqa: E402

EPSILON = 1e-5
SHAPES = [(1, 32), (17, 96), (50, 64), (130, 160), (16, 1056)]
BLOCKED_SHAPES = [(1, 256), (17, 768), (16, 1280)]
# Kernels of all kinds have their handling of rows in common.
ROWS = [
    *((kind, rows) for kind in ("int4_affine", "int6_k") for rows in (2, 9, 32, 65)),
    *((kind, rows) for kind in KINDS for rows in (1, 5)),
]


def make(
    rng: np.random.Generator, name: str, outputs: int, inputs: int
) -> tuple[PackedWeights, np.ndarray]:
    """A weight in packed weights, and what it stands for."""
    weight = random_weight(KINDS[name], outputs, inputs, rng)
    return pack_weight(weight), dequantize(weight)


def nan(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def run(
    device: str, x: np.ndarray, weight: gpu.DevicePackedWeights, **options: object
) -> np.ndarray:
    """Of activations with 16 bits, unless the options say otherwise."""
    rows = gpu.Rows.empty(*x.shape, device)
    y = options.pop("y", None)
    y = nan(device, len(x), weight.outputs) if y is None else torch.tensor(y, device=device)
    gpu.linear(torch.tensor(x, device=device), weight, y, rows, **{"fine": True, **options})
    return y.cpu().numpy()


def normed(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * norm


def check(found: np.ndarray, expected: np.ndarray, size: np.ndarray | None = None) -> None:
    """Up to 32 rows have activations of 16 bits; more have those and weights of 11 bits.

    Args:
        size: the sum of what was added up, without signs; None takes the largest of a row.
    """
    if size is None:
        size = np.abs(expected).max(-1, keepdims=True)
    size = size + 1e-30
    allowed = 1e-3 if len(found) > gpu.FEW_ROWS else 1e-4
    np.testing.assert_allclose(found / size, expected / size, atol=allowed)


@pytest.mark.parametrize(("kind", "rows"), ROWS)
def test_matches_reference(triton_device: str, kind: str, rows: int) -> None:
    for outputs, inputs in BLOCKED_SHAPES if KINDS[kind].blocked else SHAPES:
        rng = np.random.default_rng(outputs)
        panels, dense = make(rng, kind, outputs, inputs)
        x = rng.standard_normal((rows, inputs)).astype(np.float32)
        found = run(triton_device, x, gpu.DevicePackedWeights.of(panels, triton_device))
        check(found, x.astype(np.float64) @ dense.T.astype(np.float64), np.abs(x) @ np.abs(dense.T))


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_int8_can_hold_is_not_rounded(triton_device: str, kind: str, fine: bool) -> None:
    """Whole numbers, up to 127 in every group: sums in groups are exact."""
    rng = np.random.default_rng(11)
    panels, dense = make(rng, kind, 40, 1280)
    x = rng.integers(-127, 128, (9, 1280)).astype(np.float32)
    x[:, ::32] = 127
    found = run(triton_device, x, gpu.DevicePackedWeights.of(panels, triton_device), fine=fine)
    size = np.abs(x) @ np.abs(dense.T)
    np.testing.assert_allclose(found / size, x.astype(np.float64) @ dense.T / size, atol=5e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(triton_device: str, kind: str) -> None:
    rng = np.random.default_rng(12)
    panels, _ = make(rng, kind, 40, 1280)
    weight = gpu.DevicePackedWeights.of(panels, triton_device)
    x = rng.standard_normal((20, 1280)).astype(np.float32)
    every = run(triton_device, x, weight)
    for rows in (1, 5, 9):
        np.testing.assert_array_equal(run(triton_device, x[:rows], weight), every[:rows])


def test_int8_activations_are_rounded(triton_device: str) -> None:
    rng = np.random.default_rng(13)
    panels, dense = make(rng, "int4_affine", 50, 1280)
    weight = gpu.DevicePackedWeights.of(panels, triton_device)
    x = rng.standard_normal((3, 1280)).astype(np.float32)
    expected = reference.linear(x, dense)
    near, far = (
        np.abs(run(triton_device, x, weight, fine=False) - against).mean()
        for against in (expected, x @ dense.T)
    )
    assert near < 1e-2 * far


@pytest.mark.parametrize("kind", KINDS)
def test_matches_reference_on_one_input_at_a_time(triton_device: str, kind: str) -> None:
    """No other weight can hide a wrong one."""
    panels, dense = make(np.random.default_rng(4), kind, 20, 256)
    weight = gpu.DevicePackedWeights.of(panels, triton_device)
    size = np.abs(dense).max()
    for first in (0, 16, 240):
        some = np.eye(256, dtype=np.float32)[first : first + 16]
        found = run(triton_device, some, weight)
        np.testing.assert_allclose(found / size, some @ dense.T / size, atol=1e-6)
    for k in (0, 17, 31, 130, 255):
        one = np.eye(256, dtype=np.float32)[k : k + 1]
        found = run(triton_device, one, weight)
        np.testing.assert_allclose(found / size, one @ dense.T / size, atol=1e-6)


PAIRS = [("int4_affine", "int4_symmetric"), ("int8_affine", "iq4_nl"), ("int6_k", "int5_symmetric")]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: "+".join(kinds))
def test_norm_gate_and_sum(triton_device: str, kinds: tuple[str, str], rows: int) -> None:
    rng = np.random.default_rng(rows)
    inputs = max(96, *(KINDS[kind].inputs_multiple for kind in kinds))
    (gate, dense_gate), (up, dense_up) = (make(rng, kind, 50, inputs) for kind in kinds)
    ours = [gpu.DevicePackedWeights.of(panels, triton_device) for panels in (gate, up)]
    x, norm = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, inputs), inputs))
    on_device = torch.tensor(norm, device=triton_device)
    options = {"norm": on_device, "epsilon": EPSILON}
    gated_options = {**options, "activation": "silu"}
    a, b = (normed(x, norm) @ dense.T for dense in (dense_gate, dense_up))
    check(run(triton_device, x, ours[0], **options), a)
    for gated, first, second in (
        (a / (1 + np.exp(-a)) * b, *ours),
        (b / (1 + np.exp(-b)) * a, *reversed(ours)),
    ):
        found = run(triton_device, x, first, up=second, **gated_options)
        check(found, gated, 2 * np.abs(gated).max())
    before = rng.standard_normal((rows, 50)).astype(np.float32)
    check(run(triton_device, x, ours[0], add=True, y=before), before + x @ dense_gate.T)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("biases", ["none", "both", "gate", "up"])
@pytest.mark.parametrize(("activation", "curve"), [("silu", silu), ("gelu_tanh", gelu)])
def test_activations_and_biases(
    triton_device: str, rows: int, biases: str, activation: str, curve: Callable[..., np.ndarray]
) -> None:
    """A gated MLP, and the activation of one product; after a norm and without one."""
    rng = np.random.default_rng(rows)
    (gate, dense_gate), (up, dense_up) = (
        make(rng, kind, 50, 96) for kind in ("int4_affine", "int8_symmetric")
    )
    ours = [gpu.DevicePackedWeights.of(panels, triton_device) for panels in (gate, up)]
    x, norm, first, second = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 96), 96, 50, 50)
    )
    gate_bias, up_bias = (
        torch.tensor(bias, device=triton_device) if biases in ("both", name) else None
        for name, bias in (("gate", first), ("up", second))
    )
    normed_options = {"norm": torch.tensor(norm, device=triton_device), "epsilon": EPSILON}
    for options, inputs in (({}, x.astype(np.float64)), (normed_options, normed(x, norm))):
        a = inputs @ dense_gate.T + (0 if gate_bias is None else first)
        b = inputs @ dense_up.T + (0 if up_bias is None else second)
        options = {**options, "activation": activation, "bias": gate_bias}
        alone = run(triton_device, x, ours[0], **options)
        check(alone, curve(a), 2 * np.abs(a).max())
        gated = run(triton_device, x, ours[0], up=ours[1], up_bias=up_bias, **options)
        check(gated, curve(a) * b, 2 * np.abs(curve(a) * b).max())


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 5])
def test_bias_is_added_with_what_was_there(triton_device: str, rows: int) -> None:
    rng = np.random.default_rng(8)
    panels, dense = make(rng, "int4_affine", 50, 96)
    x, before, bias = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 96), (rows, 50), 50)
    )
    weight = gpu.DevicePackedWeights.of(panels, triton_device)
    added = torch.tensor(bias, device=triton_device)
    result = run(triton_device, x, weight, bias=added, add=True, y=before)
    check(result, before + x @ dense.T + bias)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e30])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_of_tiny_and_huge_numbers(
    triton_device: str, activation: str, size: float
) -> None:
    """They go to zero on one side and to the number itself on the other, and are never NaN."""
    panels, dense = make(np.random.default_rng(0), "int8_symmetric", 40, 32)
    x = np.full((1, 32), size, np.float32)
    weight = gpu.DevicePackedWeights.of(panels, triton_device)
    result = run(triton_device, x, weight, activation=activation)[0]
    product = x[0].astype(np.float64) @ dense.T
    with np.errstate(over="ignore"):
        expected = (silu if activation == "silu" else gelu)(product)
    np.testing.assert_allclose(result / size, expected / size, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
def test_softcap_and_peaks(triton_device: str, rows: int) -> None:
    rng = np.random.default_rng(9)
    panels, dense = make(rng, "int8_symmetric", 50, 64)
    x = (10 * rng.standard_normal((rows, 64))).astype(np.float32)
    peaks = gpu.Peaks(*(nan(triton_device, rows, 4) for _ in range(2)))
    weight = gpu.DevicePackedWeights.of(panels, triton_device)
    result = run(triton_device, x, weight, softcap=6.0, peaks=peaks)
    expected = 6 * np.tanh(x.astype(np.float64) @ dense.T / 6)
    assert np.abs(expected).max() > 5.5
    check(result, expected, 3 * np.abs(expected).max())
    padded = np.pad(result, ((0, 0), (0, 14)), constant_values=-np.inf)
    np.testing.assert_array_equal(peaks.largest.cpu(), padded.reshape(rows, 4, 16).max(axis=2))


@pytest.mark.parametrize("rows", [1, 5])
def test_columns_of_a_wider_array(triton_device: str, rows: int) -> None:
    """Weights that cannot be stacked write side by side, and nothing beyond their outputs."""
    rng = np.random.default_rng(5)
    parts = [make(rng, kind, outputs, 256) for kind, outputs in (("int6_k", 48), ("int4_k", 21))]
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    y = nan(triton_device, rows, 80)
    room = gpu.Rows.empty(rows, 256, triton_device)
    for (panels, _), first in zip(parts, (0, 48), strict=True):
        weight = gpu.DevicePackedWeights.of(panels, triton_device)
        part = y[:, first : first + weight.outputs]
        gpu.linear(torch.tensor(x, device=triton_device), weight, part, room, fine=True)
    check(y[:, :69].cpu().numpy(), x @ np.concatenate([dense for _, dense in parts]).T)
    assert y[:, 69:].isnan().all()


@pytest.mark.parametrize("rows", [1, 5])
def test_stacked_weights(triton_device: str, rows: int) -> None:
    rng = np.random.default_rng(6)
    parts = [make(rng, "int6_k", outputs, 256) for outputs in (32, 16, 21)]
    every = [panels for panels, _ in parts]
    assert gpu.stackable(every[0], every[1])
    assert not gpu.stackable(every[2], every[0])  # ends within a panel
    assert not gpu.stackable(every[0], make(rng, "int5_k", 16, 256)[0])
    weight = gpu.DevicePackedWeights.stacked(every, triton_device)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    check(run(triton_device, x, weight), x @ np.concatenate([dense for _, dense in parts]).T)


@pytest.mark.parametrize("wrong", [(50, 64), (34, 96)])
def test_a_second_weight_of_another_shape_is_refused(
    triton_device: str, wrong: tuple[int, int]
) -> None:
    rng = np.random.default_rng(7)
    gate, up = (
        gpu.DevicePackedWeights.of(make(rng, "int4_affine", *shape)[0], triton_device)
        for shape in ((50, 96), wrong)
    )
    with pytest.raises(ValueError, match="another shape"):
        run(triton_device, np.ones((1, 96), np.float32), gate, up=up)


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e30])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["int4_affine", "int6_k", "iq4_xs"])
def test_tiny_and_huge_rows_stay_finite(
    triton_device: str, kind: str, size: float, rows: int
) -> None:
    panels, dense = make(np.random.default_rng(0), kind, 17, 256)
    x = np.full((rows, 256), size, np.float32)
    found = run(triton_device, x, gpu.DevicePackedWeights.of(panels, triton_device))
    assert np.isfinite(found).all()
    if size > 1:
        check(found, x.astype(np.float64) @ dense.T)


@pytest.mark.parametrize(("outputs", "count"), [(5, 1), (16, 3), (701, 1), (50, 11)])
def test_peaks_of_panels(triton_device: str, outputs: int, count: int) -> None:
    panels, _ = make(np.random.default_rng(1), "int8_symmetric", outputs, 64)
    x = np.random.default_rng(2).standard_normal((count, 64)).astype(np.float32)
    peaks = gpu.Peaks(*(nan(triton_device, count, len(panels.data)) for _ in range(2)))
    found = run(triton_device, x, gpu.DevicePackedWeights.of(panels, triton_device), peaks=peaks)
    padded = np.full((count, 16 * len(panels.data)), -np.inf)
    padded[:, :outputs] = found
    rows = padded.reshape(count, -1, 16)
    np.testing.assert_array_equal(peaks.largest.cpu(), rows.max(axis=2))
    share = np.exp(rows - rows.max(axis=2, keepdims=True)).sum(axis=2)
    np.testing.assert_allclose(peaks.share.cpu(), share, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 33.9])
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows(triton_device: str, kind: str, scale: float) -> None:
    panels, _ = make(np.random.default_rng(3), kind, 70, 768)
    tokens = [0, 69, 15, 16, 3, 3]
    x = nan(triton_device, len(tokens), 768)
    weight = gpu.DevicePackedWeights.of(panels, triton_device)
    gpu.embed(weight, torch.tensor(tokens, device=triton_device), x, scale=scale)
    expected = scale * rows_of(panels, tokens)
    # a GPU rounds once where numpy rounds a product and a sum
    size = np.abs(expected).max()
    np.testing.assert_allclose(x.cpu().numpy() / size, expected / size, atol=1e-6)
