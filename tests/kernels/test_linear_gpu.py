from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

from edgellm.kernels.int4 import Int4Weight, dequantize, pack  # noqa: E402

from edgellm.kernels.linear import (  # noqa: E402
    Panels,
    gpu,
    int4_panels,
    int8_panels,
    int8_rows,
)

EPSILON = 1e-5
SHAPES = [(1, 32), (17, 96), (50, 64), (130, 160), (16, 2080)]
ROWS = [1, 2, 16, 17, 65]


def halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (0.01 * (0.5 + rng.random(shape))).astype(np.float16).astype(np.float32)


def make(
    rng: np.random.Generator, kind: str, outputs: int, inputs: int
) -> tuple[Panels, np.ndarray]:
    """A weight in panels, and what it stands for."""
    scale = halves(rng, outputs, inputs // 32)
    if kind == "int8":
        codes = rng.integers(-127, 128, (outputs, inputs), dtype=np.int8)
        return int8_panels(codes, scale), codes * np.repeat(scale, 32, axis=-1)
    codes = rng.integers(0, 16, (outputs, inputs), dtype=np.uint8)
    offset = -8 * scale if kind == "symmetric" else -halves(rng, *scale.shape)
    weight = Int4Weight(pack(codes), scale, offset)
    return int4_panels(weight), dequantize(weight)


def nan(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def run(device: str, x: np.ndarray, weight: gpu.DevicePanels, **options: object) -> np.ndarray:
    rows = gpu.Rows(nan(device, *x.shape, dtype=torch.float16), nan(device, len(x)))
    y = options.pop("y", None)
    y = nan(device, len(x), weight.outputs) if y is None else torch.tensor(y, device=device)
    gpu.linear(torch.tensor(x, device=device), weight, y, rows, **options)
    return y.cpu().numpy()


def normed(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * norm


def check(found: np.ndarray, expected: np.ndarray, size: np.ndarray | None = None) -> None:
    """One row is computed in float32; several have activations and weights of 11 bits.

    Args:
        size: the sum of what was added up, without signs; None takes the largest of a row.
    """
    if size is None:
        size = np.abs(expected).max(-1, keepdims=True)
    size = size + 1e-30
    np.testing.assert_allclose(
        found / size, expected / size, atol=2e-6 if len(found) == 1 else 1e-3
    )


@pytest.mark.parametrize("kind", ["symmetric", "affine", "int8"])
@pytest.mark.parametrize("rows", ROWS)
def test_matches_reference(triton_device: str, kind: str, rows: int) -> None:
    for outputs, inputs in SHAPES:
        rng = np.random.default_rng(outputs)
        panels, dense = make(rng, kind, outputs, inputs)
        x = rng.standard_normal((rows, inputs)).astype(np.float32)
        found = run(triton_device, x, gpu.DevicePanels.of(panels, triton_device))
        check(found, x.astype(np.float64) @ dense.T.astype(np.float64), np.abs(x) @ np.abs(dense.T))


@pytest.mark.parametrize("rows", [1, 5])
def test_norm_gate_and_sum(triton_device: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    gate, dense_gate = make(rng, "affine", 50, 96)
    up, dense_up = make(rng, "symmetric", 50, 96)
    ours = [gpu.DevicePanels.of(panels, triton_device) for panels in (gate, up)]
    x, norm = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 96), 96))
    on_device = torch.tensor(norm, device=triton_device)
    options = {"norm": on_device, "epsilon": EPSILON}
    a, b = (normed(x, norm) @ dense.T for dense in (dense_gate, dense_up))
    check(run(triton_device, x, ours[0], **options), a)
    gated = a / (1 + np.exp(-a)) * b
    check(run(triton_device, x, ours[0], up=ours[1], **options), gated, 2 * np.abs(gated).max())
    before = rng.standard_normal((rows, 50)).astype(np.float32)
    check(run(triton_device, x, ours[0], add=True, y=before), before + x @ dense_gate.T)


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e30])
@pytest.mark.parametrize("rows", [1, 3])
def test_tiny_and_huge_rows_stay_finite(triton_device: str, size: float, rows: int) -> None:
    panels, dense = make(np.random.default_rng(0), "affine", 17, 64)
    x = np.full((rows, 64), size, np.float32)
    found = run(triton_device, x, gpu.DevicePanels.of(panels, triton_device))
    assert np.isfinite(found).all()
    if size > 1:
        check(found, x.astype(np.float64) @ dense.T)


@pytest.mark.parametrize("outputs", [5, 16, 3001])
def test_peaks_of_panels(triton_device: str, outputs: int) -> None:
    panels, _ = make(np.random.default_rng(1), "int8", outputs, 64)
    x = np.random.default_rng(2).standard_normal((1, 64)).astype(np.float32)
    peaks = gpu.Peaks(*(nan(triton_device, len(panels.data)) for _ in range(2)))
    found = run(triton_device, x, gpu.DevicePanels.of(panels, triton_device), peaks=peaks)
    padded = np.full(16 * len(panels.data), -np.inf)
    padded[:outputs] = found[0]
    rows = padded.reshape(-1, 16)
    np.testing.assert_array_equal(peaks.largest.cpu(), rows.max(axis=1))
    share = np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(peaks.share.cpu(), share, rtol=1e-5)


def test_embedding_rows(triton_device: str) -> None:
    panels, _ = make(np.random.default_rng(3), "int8", 70, 96)
    tokens = [0, 69, 15, 16, 3, 3]
    x = nan(triton_device, len(tokens), 96)
    weight = gpu.DevicePanels.of(panels, triton_device)
    gpu.embed(weight, torch.tensor(tokens, device=triton_device), x)
    np.testing.assert_array_equal(x.cpu().numpy(), int8_rows(panels, tokens))
