from __future__ import annotations

import numpy as np
import pytest

from edgellm.quantize.calibration import ShadowLinear, excess_of

SCALE = 0.05


def activations(rows: int = 7, inputs: int = 40) -> np.ndarray:
    """Most values within 127 steps, some channels far beyond on both sides."""
    x = np.random.default_rng(0).standard_normal((rows, inputs)).astype(np.float32)
    x[2, 5], x[3, 5], x[4, 11], x[0, 39] = 900.0, -77.0, -6.5, 6.36
    return x


@pytest.mark.parametrize("bits", [8, 16])
def test_clipped_and_excess_are_the_whole(bits: int) -> None:
    x, half = activations(), 1 << bits - 1
    scale = np.float32(SCALE if bits == 8 else 0.02)
    codes = np.rint(x / scale)
    clipped = np.clip(codes, -half, half - 1)
    found = excess_of(x, float(scale), bits=bits)
    whole = clipped * scale
    whole[:, found.columns] += found.values
    np.testing.assert_allclose(whole, codes * scale, rtol=1e-6)
    assert found.columns.tolist() == ([5, 11, 39] if bits == 8 else [5])


def test_correction_is_exact() -> None:
    rng = np.random.default_rng(1)
    x = activations()
    codes = rng.integers(-127, 128, (40, 24), dtype=np.int8)
    weight_scale = rng.random(24).astype(np.float32)
    weight = codes * weight_scale
    layer = ShadowLinear(SCALE, 8, codes, weight_scale)
    exact = np.rint(x.astype(np.float64) / np.float32(SCALE))
    expected = (exact - np.clip(exact, -128, 127)) * np.float32(SCALE) @ weight.astype(np.float64)
    found = layer.correction(x)
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_nothing_beyond_costs_no_product() -> None:
    layer = ShadowLinear(10.0, 8, np.ones((40, 3), np.int8), np.ones(3, np.float32))
    assert layer.correction(activations()[5:6]) is None
