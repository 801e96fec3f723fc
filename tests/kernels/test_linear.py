from __future__ import annotations

import ctypes

import numpy as np
import pytest

from edgellm.kernels.int4 import Int4Weight, dequantize, pack
from edgellm.kernels.linear import Panels, int4_panels, int8_panels, int8_rows, kind_of, reference
from edgellm.kernels.linear.native import linear


def halves(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16).astype(np.float32)


def random_weight(kind: str, outputs: int, inputs: int) -> tuple[Panels, np.ndarray]:
    """Panels and the float32 weight that they stand for."""
    rng = np.random.default_rng(outputs + inputs)
    scale = halves(rng, (outputs, inputs // 32))
    if kind == "int8_symmetric":
        codes = rng.integers(-127, 128, (outputs, inputs), dtype=np.int8)
        return int8_panels(codes, scale), codes * np.repeat(scale, 32, axis=-1)
    offset = -8 * scale if kind == "int4_symmetric" else halves(rng, scale.shape)
    unsigned = rng.integers(0, 16, (outputs, inputs), dtype=np.uint8)
    weight = Int4Weight(pack(unsigned), scale, offset)
    return int4_panels(weight), dequantize(weight)


KINDS = ["int4_symmetric", "int4_affine", "int8_symmetric"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "rows"),
    [
        *((16, 32, rows) for rows in (1, 2, 3, 4, 7, 16, 21, 24, 51)),
        *((1, 64, rows) for rows in (1, 5, 26)),
        *((33, 96, rows) for rows in (1, 2, 3, 4, 7, 16, 21, 24, 51)),
        *((100, 576, rows) for rows in (1, 5, 30)),
        (289, 1056, 27),  # more than one stretch of inputs, more than one run of panels
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_matches_reference(
    compiled: ctypes.CDLL, kind: str, outputs: int, inputs: int, rows: int
) -> None:
    panels, weight = random_weight(kind, outputs, inputs)
    assert panels.kind == kind == kind_of(panels.data)
    x = np.random.default_rng(rows).standard_normal((rows, inputs)).astype(np.float32)
    expected = reference.linear(x, weight)
    found = linear(compiled, x, panels, threads=2)
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(weight).max() * inputs


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_activations_round_less(compiled: ctypes.CDLL, kind: str) -> None:
    """Outputs from `fine_from` on, to the start of their panel, are close to the exact product."""
    panels, weight = random_weight(kind, 64, 96)
    x = np.random.default_rng(5).standard_normal((9, 96)).astype(np.float32)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    error = np.abs(linear(compiled, x, panels, fine_from=40) - exact)
    assert error[:, 32:].max() < 0.01 * error[:, :32].max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fine_from", [None, 0])
def test_company_makes_no_difference(
    compiled: ctypes.CDLL, kind: str, fine_from: int | None
) -> None:
    panels, _ = random_weight(kind, 48, 608)
    x = np.random.default_rng(6).standard_normal((50, 608)).astype(np.float32)
    together = linear(compiled, x, panels, fine_from=fine_from, threads=2)
    for row in range(50):
        alone = linear(compiled, x[row : row + 1], panels, fine_from=fine_from)
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30])
def test_extreme_activations_stay_finite(compiled: ctypes.CDLL, scale: float) -> None:
    panels, weight = random_weight("int4_affine", 16, 64)
    x = np.full((2, 64), scale, np.float32)
    x[:, 3] *= -1
    expected = reference.linear(x, weight)
    for fine_from in (None, 0):
        found = linear(compiled, x, panels, fine_from=fine_from)
        assert np.isfinite(found).all()
        if scale != 1e-42:  # 127 steps of a subnormal are fewer
            np.testing.assert_allclose(found, expected, rtol=1e-2, atol=abs(scale))


def test_broken_activations_show(compiled: ctypes.CDLL) -> None:
    panels, _ = random_weight("int4_symmetric", 16, 64)
    for value in (np.nan, np.inf):
        x = np.ones((1, 64), np.float32)
        x[0, 40] = value
        for fine_from in (None, 0):
            assert np.isnan(linear(compiled, x, panels, fine_from=fine_from)).all()


def test_rows_of_a_table() -> None:
    panels, weight = random_weight("int8_symmetric", 40, 64)
    np.testing.assert_array_equal(int8_rows(panels, [39, 0, 16, 16]), weight[[39, 0, 16, 16]])


def test_scales_must_be_halves() -> None:
    codes = np.ones((16, 32), np.int8)
    for scale in (0.1, 1e6):
        with pytest.raises(ValueError, match="half"):
            int8_panels(codes, np.full((16, 1), scale, np.float32))
