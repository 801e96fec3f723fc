from __future__ import annotations

import numpy as np
import pytest

from edgellm.quantize.weights import quantize_channels, quantize_channels_for

DAMPING = 0.01


def correlated(rows: int, columns: int, *, seed: int) -> np.ndarray:
    """Inputs `[rows, columns]` most of which lie in a quarter of all directions."""
    rng = np.random.default_rng(seed)
    few = rng.standard_normal((rows, max(1, columns // 4)))
    mixed = few @ rng.standard_normal((few.shape[1], columns))
    return (mixed + 0.1 * rng.standard_normal(mixed.shape)).astype(np.float32)


def textbook(weight: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """GPTQ as its paper has it, in float64: a rounded column's error goes to all that are left,
    by the inverse Hessian, which is then that of those."""
    steps = np.abs(weight).max(axis=1) * np.float32(1 / 127)
    left = weight.astype(np.float64) / steps[:, None]
    damping = DAMPING * np.diag(moments).mean()
    inverse = np.linalg.inv(moments.astype(np.float64) + damping * np.eye(len(moments)))
    codes = np.empty(weight.shape, np.int8)
    for k in range(weight.shape[1]):
        codes[:, k] = np.rint(left[:, k]).clip(-127, 127)
        error = (left[:, k] - codes[:, k]) / inverse[k, k]
        left -= np.outer(error, inverse[k])
        inverse -= np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
        inverse[k, k] = 1.0  # this column is done
    return codes


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (5, 64), (16, 65), (9, 150)])
def test_equal_to_the_papers_algorithm(rows: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    weight = rng.standard_normal((rows, columns)).astype(np.float32)
    x = correlated(300, columns, seed=rows)
    moments = x.T @ x / len(x)
    codes, scale = quantize_channels_for(weight, moments)
    # one rounding that goes the other way, by an ulp, changes those after it
    assert (codes != textbook(weight, moments)).mean() < 0.01
    np.testing.assert_array_equal(scale, quantize_channels(weight)[1])


def test_products_are_closer_than_with_each_weight_to_the_nearest() -> None:
    weight = np.random.default_rng(0).standard_normal((48, 160)).astype(np.float32)
    x, others = np.split(correlated(4000, 160, seed=1), 2)

    def error(codes: np.ndarray, scale: np.ndarray) -> float:
        return float(np.linalg.norm(others @ (codes * scale[:, None] - weight).T))

    nearest = error(*quantize_channels(weight))
    assert error(*quantize_channels_for(weight, x.T @ x / len(x))) < 0.5 * nearest


@pytest.mark.parametrize("moments", [np.eye(40), np.zeros((40, 40)), np.diag(np.arange(40.0))])
def test_inputs_without_correlation_leave_each_weight_to_the_nearest(moments: np.ndarray) -> None:
    weight = np.random.default_rng(2).standard_normal((6, 40)).astype(np.float32)
    found = quantize_channels_for(weight, moments.astype(np.float32))
    for ours, nearest in zip(found, quantize_channels(weight), strict=True):
        np.testing.assert_array_equal(ours, nearest)


def test_fewer_rows_than_columns_and_a_row_of_zeros() -> None:
    weight = np.random.default_rng(3).standard_normal((4, 96)).astype(np.float32)
    weight[1] = 0
    x = correlated(5, 96, seed=4)
    codes, scale = quantize_channels_for(weight, x.T @ x / len(x))
    assert not codes[1].any()
    assert np.abs(codes.astype(int)).max() <= 127
    products, exact = x @ (codes * scale[:, None]).T, x @ weight.T
    assert np.abs(products - exact).max() < 0.005 * np.abs(exact).max()
