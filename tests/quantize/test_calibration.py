from __future__ import annotations

import numpy as np
import pytest

from edgellm.quantize.calibration import (
    METHODS,
    Method,
    Observation,
    error_share,
    grid_scale,
    reach,
)


def observed(rows: np.ndarray) -> Observation:
    seen = Observation.of(rows.shape[1])
    for part in np.array_split(rows, 5):
        seen.add(part)
    return seen


@pytest.fixture
def heavy_tailed() -> np.ndarray:
    rows = np.random.default_rng(0).standard_t(3, (400, 24)).astype(np.float32)
    rows[7, 3] = -90
    return rows


def error(rows: np.ndarray, far: float, bits: int) -> float:
    """Mean squared error of rounding to the grid, written out."""
    step, most = grid_scale(far, bits=bits), (1 << bits - 1) - 1
    codes = np.clip(np.rint(rows.astype(np.float64) / step), -most, most)
    return float(((codes * step - rows) ** 2).mean())


def test_largest_of_each_channel(heavy_tailed: np.ndarray) -> None:
    seen = observed(heavy_tailed)
    np.testing.assert_array_equal(seen.largest, np.abs(heavy_tailed).max(axis=0))
    assert seen.counts.sum() == heavy_tailed.size


def test_minmax_reaches_everything(heavy_tailed: np.ndarray) -> None:
    assert reach(observed(heavy_tailed), bits=8, method="minmax") == 90
    assert reach(observed(heavy_tailed), bits=16, method="minmax", headroom=1.5) == 135


@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9])
def test_percentile(heavy_tailed: np.ndarray, percentile: float) -> None:
    """As exact as the bins, of which there are 128 for each power of two."""
    found = reach(observed(heavy_tailed), bits=8, method="percentile", percentile=percentile)
    exact = np.percentile(np.abs(heavy_tailed), percentile, method="inverted_cdf")
    assert found == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("bits", [4, 8])
def test_mse_is_the_best_reach(heavy_tailed: np.ndarray, bits: int) -> None:
    found = reach(observed(heavy_tailed), bits=bits, method="mse")
    best = min(error(heavy_tailed, far, bits) for far in np.geomspace(0.5, 90, 200))
    assert error(heavy_tailed, found, bits) < 1.1 * best
    assert found < 90 or bits == 8


@pytest.mark.parametrize("far", [0.5, 2.0, 9.0, 90.0])
def test_share_of_energy_that_a_grid_loses(heavy_tailed: np.ndarray, far: float) -> None:
    rows = heavy_tailed.astype(np.float64)
    energy = float((rows**2).mean())
    found = error_share(observed(heavy_tailed), far, bits=8)
    assert found == pytest.approx(error(heavy_tailed, far, 8) / energy, rel=0.12)
    step = grid_scale(far, bits=8)
    rounded = float(((np.rint(rows / step) * step - rows) ** 2).mean())
    found = error_share(observed(heavy_tailed), far, bits=8, clips=False)
    assert found == pytest.approx(rounded / energy, rel=0.12)
    assert error_share(observed(np.zeros((8, 4), np.float32)), far, bits=8) == 0


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_zeros(method: Method) -> None:
    assert reach(observed(np.zeros((8, 4), np.float32)), bits=8, method=method) > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_values_are_refused(value: float) -> None:
    with pytest.raises(FloatingPointError, match="infinite or not a number"):
        Observation.of(2).add(np.array([[1, value]], np.float32))


def test_grid_reaches_with_its_last_code() -> None:
    assert grid_scale(1.0, bits=8) * 127 == pytest.approx(1.0)
    assert grid_scale(1.0, bits=16) * 32767 == pytest.approx(1.0)
