from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.kernels.native import library
from edgellm.kernels.sampling import log_sum_exp, native, portable, reference, top_k

SIZES = [1, 3, 16, 17, 1000, 49_153]


def random_scores(size: int) -> np.ndarray:
    return (np.random.default_rng(size).standard_normal(size) * 10).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_log_sum_exp(compiled: ctypes.CDLL, size: int) -> None:
    scores = random_scores(size)
    expected = reference.log_sum_exp(scores)
    assert native.log_sum_exp(compiled, scores) == pytest.approx(expected, abs=1e-6)
    assert portable.log_sum_exp(scores) == pytest.approx(expected, abs=1e-6)


def test_log_sum_exp_of_what_is_ruled_out(compiled: ctypes.CDLL) -> None:
    scores = np.full(40, -np.inf, np.float32)
    scores[[3, 35]] = 1.5
    assert native.log_sum_exp(compiled, scores) == pytest.approx(1.5 + np.log(2))
    assert portable.log_sum_exp(scores) == pytest.approx(1.5 + np.log(2))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 2, 40, 999])
def test_top_k(compiled: ctypes.CDLL, size: int, k: int) -> None:
    scores = random_scores(size)
    if k < size:
        assert native.top_k(compiled, scores, k).tolist() == reference.top_k(scores, k)
    assert portable.top_k(scores, k).tolist() == reference.top_k(scores, k)


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 7.0]), min_size=1), st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_equal_scores_go_by_id(values: list[float], k: int) -> None:
    scores = np.array(values, np.float32)
    assert top_k(scores, k).tolist() == reference.top_k(scores, k)


@pytest.mark.skipif(library() is None, reason="installed without a compiler")
def test_scores_that_rise_replace_all_before_them() -> None:
    scores = np.arange(10_000, dtype=np.float32)
    assert top_k(scores, 50).tolist() == list(range(9_999, 9_949, -1))


def test_not_a_number_is_not_the_best() -> None:
    scores = random_scores(100)
    scores[[0, 50, 99]] = np.nan
    found = top_k(scores, 5) if library() is not None else np.zeros(0, np.intp)
    assert not np.isnan(scores[found]).any()


def test_all_of_them() -> None:
    scores = random_scores(70)
    assert top_k(scores, 0).tolist() == reference.top_k(scores, 70)
    assert np.isfinite(log_sum_exp(scores))
