from __future__ import annotations

import numpy as np
import pytest

from edgellm.quantize.error import relative_error, worst_line_error, worst_row_error


def test_relative_error() -> None:
    exact = np.array([[3.0, 4.0]], np.float32)
    assert relative_error(exact, exact * np.float32(1.5)) == pytest.approx(0.5)
    assert relative_error(np.zeros((1, 2), np.float32), exact) == 0


def test_the_worst_row_is_measured_by_itself() -> None:
    exact = np.ones((100, 16), np.float32)
    found = exact.copy()
    found[7] *= -1
    assert worst_row_error(exact, found) == pytest.approx(2)
    assert relative_error(exact, found) == pytest.approx(0.2)


def test_a_small_row_is_measured_by_the_average() -> None:
    """Rounding of a row of near zeros is no fault."""
    exact = np.ones((4, 4), np.float32)
    exact[0] = 1e-6
    found = exact.copy()
    found[0] = 1e-3
    assert worst_row_error(exact, found) == pytest.approx(1e-3 / np.sqrt(3 / 4), rel=0.01)


def test_a_wrong_column_hides_in_no_row() -> None:
    exact = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    found = exact.copy()
    found[:, 5] *= -1
    assert worst_row_error(exact, found) < 1
    assert worst_line_error(exact, found) > 1.5
    assert worst_line_error(exact.T, found.T) == worst_line_error(exact, found)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_infinitely_wrong(value: float) -> None:
    exact = np.ones((2, 2), np.float32)
    found = exact.copy()
    found[1, 0] = value
    assert worst_row_error(exact, found) == np.inf
    assert worst_line_error(exact, found) == np.inf
    assert worst_row_error(np.zeros_like(exact), np.zeros_like(exact)) == 0
