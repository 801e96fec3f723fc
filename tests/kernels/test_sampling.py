from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import HERE, UseISA

from edgellm.kernels.native import library
from edgellm.kernels.sampling import (
    log_sum_exp,
    native,
    portable,
    reference,
    rows_of_logits,
    top_k,
)

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
def test_top_k(use_isa: UseISA, size: int) -> None:
    scores = random_scores(size)
    for k in (1, 2, 40, 999):
        expected = reference.top_k(scores, k)
        assert portable.top_k(scores, k).tolist() == expected
        for isa in HERE if k < size else ():
            assert native.top_k(use_isa(isa), scores, k).tolist() == expected, (isa, k)


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 7.0]), min_size=1), st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_equal_scores_go_by_id(values: list[float], k: int) -> None:
    scores = np.array(values, np.float32)
    assert top_k(scores, k).tolist() == reference.top_k(scores, k)


@pytest.mark.usefixtures("native_library")
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


def padded_rows(rows: int, size: int) -> np.ndarray:
    """Logits as a step leaves them: rows with a gap behind each, which is nobody's."""
    whole = np.full((rows, -(-size // 16) * 16 + 16), np.nan, np.float32)
    whole[:, :size] = np.random.default_rng(rows * size).standard_normal((rows, size)) * 10
    return whole[:, :size]


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("size", [*SIZES[:-1], 4097])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_candidates(use_isa: UseISA, rows: int, size: int) -> None:
    logits, wanted = padded_rows(rows, size), [(40, 0, 128, 1, 2000)[r % 5] for r in range(rows)]
    expected = reference.candidates(logits, wanted)

    def compare(results: list[tuple[float, np.ndarray]]) -> None:
        for (total, ids), (expected_total, expected_ids) in zip(results, expected, strict=True):
            assert total == pytest.approx(expected_total, abs=1e-6)
            assert ids.tolist() == expected_ids

    compare(portable.candidates(logits, wanted))
    for isa, threads in itertools.product(HERE, (1, 3)):
        ours = native.candidates(use_isa(isa), logits, wanted, threads=threads)
        compare(ours)
        assert [total for total, _ in ours] == [log_sum_exp(row) for row in logits]  # the same bits


@pytest.mark.parametrize("size", [37, 200, 4096])
@pytest.mark.parametrize("values", [[1.5], [-np.inf, 2.0], [-np.inf, 0.0, 0.5, 7.0]])
def test_equal_candidates_go_by_id(use_isa: UseISA, values: list[float], size: int) -> None:
    for k in (1, 3, 40):
        logits = np.random.default_rng(k).choice(np.array(values, np.float32), (9, size))
        expected = [ids for _, ids in reference.candidates(logits, [k] * 9)]
        found = [portable.candidates(logits, [k] * 9)]
        found += [native.candidates(use_isa(isa), logits, [k] * 9) for isa in HERE]
        for results in found:
            assert [ids.tolist() for _, ids in results] == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 16, 99])
def test_a_row_that_is_broken_comes_whole(bad: float, place: int, compiled: ctypes.CDLL) -> None:
    """So that whoever samples from it sees it; its neighbours do not notice."""
    logits = padded_rows(3, 100)
    logits[1, place] = bad
    for results in (
        native.candidates(compiled, logits, [5, 5, 5]),
        portable.candidates(logits, [5, 5, 5]),
        reference.candidates(logits, [5, 5, 5]),
    ):
        assert [len(ids) for _, ids in results] == [5, 0, 5]
    rows = rows_of_logits(logits, [5, 5, 0])
    assert [row.scores.shape[0] for row in rows] == [5, 100, 100]
    assert rows[0].best(3) == rows_of_logits(logits, [0, 0, 0])[0].best(3)


def test_no_rows() -> None:
    assert rows_of_logits(np.empty((0, 9), np.float32), []) == []
