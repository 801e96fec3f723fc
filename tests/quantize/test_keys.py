from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels.rope import reference as rope
from edgellm.quantize.basis import common_part, pair_exponents


@pytest.mark.parametrize("half", [8, 3])
def test_common_part_is_the_mean_of_the_turned_bias(half: int) -> None:
    bias = np.random.default_rng(0).standard_normal((2, 16))
    inv_freq = (100000.0 ** (-np.arange(half) / half)).tolist()
    turned = rope.apply(np.broadcast_to(bias, (4096, 2, 16)), inv_freq, 0)
    found = common_part(bias, inv_freq)
    np.testing.assert_allclose(found, turned.mean(axis=0), atol=1e-9)
    left = np.square(turned - found).sum(axis=-1).mean()
    assert left < np.square(bias).sum(axis=-1).mean()


def test_what_does_not_turn_is_wholly_common() -> None:
    bias = np.ones((1, 8))
    found = common_part(bias, [1.0, 1e-9])
    np.testing.assert_allclose(found[0, [1, 3, 4, 5, 6, 7]], 1, atol=1e-5)
    assert np.abs(found[0, [0, 2]]).max() < 1e-3


def test_exponents_are_the_root_of_the_ratio_around_the_middle() -> None:
    key = np.array([[1.0, 16.0, 1.0, 0.0, 1e30]])
    query = np.array([[1.0, 1.0, 4.0, 1.0, 1e-30]])
    assert pair_exponents(key, query).tolist() == [[-1, 1, -2, 0, 8]]


def test_equal_sizes_and_zeros_change_nothing() -> None:
    assert not pair_exponents(np.full((2, 4), 3.0), np.full((2, 4), 5.0)).any()
    assert not pair_exponents(np.zeros((2, 4)), np.ones((2, 4))).any()
