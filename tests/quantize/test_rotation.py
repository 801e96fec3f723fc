from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels import hadamard
from edgellm.quantize import basis as rotation


@pytest.mark.parametrize("size", [96, 576, 2048, 33])
def test_random_rotation_is_orthogonal(size: int) -> None:
    matrix = rotation.random_rotation(size, seed=7)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-10)


def test_random_rotation_spreads_an_outlier() -> None:
    x = np.zeros(576)
    x[17] = 100
    assert np.abs(x @ rotation.random_rotation(576, seed=7)).max() < 10


def test_rotated_layers_compute_the_same() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((48, 96)).astype(np.float32)
    x = rng.standard_normal((5, 96))
    matrix_in = rotation.random_rotation(96, seed=1)
    matrix_out = rotation.random_rotation(48, seed=2)
    expected = x @ weight.T
    found = (x @ matrix_in) @ rotation.rotate_input(weight, matrix_in).T
    np.testing.assert_allclose(found, expected, atol=1e-4)
    found = x @ rotation.rotate_output(weight, matrix_out).T @ matrix_out.T
    np.testing.assert_allclose(found, expected, atol=1e-4)
    block = hadamard.matrix(32)
    rotated = (x.reshape(5, 3, 32) @ block).reshape(5, 96)
    found = rotated @ rotation.rotate_input_blocks(weight, block).T
    np.testing.assert_allclose(found, expected, atol=1e-4)
    across = rotation.spreading(3)
    rotated = (across @ (x.reshape(5, 3, 32) @ block)).reshape(5, 96)
    found = rotated @ rotation.rotate_input_blocks(weight, block, across).T
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 9, 24, 64, 224])
def test_spreading_is_orthogonal_and_even(size: int) -> None:
    matrix = rotation.spreading(size)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    assert np.abs(matrix).max() <= np.sqrt(2 / size) + 1e-12
