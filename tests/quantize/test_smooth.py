from __future__ import annotations

import numpy as np
import pytest

from edgellm.quantize.smooth import smoothing


def test_product_is_the_same_and_activations_are_flatter() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 16)).astype(np.float32) * np.logspace(-1, 2, 16, dtype=np.float32)
    weight = rng.standard_normal((8, 16)).astype(np.float32)
    s = smoothing(np.abs(x).max(axis=0), np.abs(weight).max(axis=0))
    np.testing.assert_allclose((x / s) @ (weight * s).T, x @ weight.T, rtol=1e-3, atol=1e-3)
    before, after = np.abs(x).max(axis=0), np.abs(x / s).max(axis=0)
    assert after.max() / after.min() < 0.1 * before.max() / before.min()


def test_equation_4() -> None:
    found = smoothing(np.array([16.0], np.float32), np.array([4.0], np.float32), alpha=0.75)
    assert found[0] == pytest.approx(8 / 4**0.25)


def test_a_channel_without_values_stays_finite() -> None:
    zeros = np.zeros(3, np.float32)
    assert np.isfinite(smoothing(zeros, np.ones(3, np.float32))).all()
    assert (smoothing(np.ones(3, np.float32), zeros) > 0).all()
