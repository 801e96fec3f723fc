from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels import hadamard
from edgellm.kernels.hadamard import reference


@pytest.mark.parametrize("width", [1, 20, 64, 80, 96, 256])
def test_matches_reference(width: int) -> None:
    x = np.random.default_rng(width).standard_normal((3, 2, width)).astype(np.float32)
    found = hadamard.transform(x)
    np.testing.assert_allclose(found, reference.transform(x), atol=1e-5)
    np.testing.assert_allclose(hadamard.transform(found), x, atol=1e-5)


def test_rows_have_the_same_bits_however_many_come() -> None:
    x = np.random.default_rng(0).standard_normal((300, 80)).astype(np.float32)
    parts = [hadamard.transform(x[a:b]) for a, b in ((0, 1), (1, 3), (3, 300))]
    np.testing.assert_array_equal(np.concatenate(parts), hadamard.transform(x))


@pytest.mark.parametrize("size", [1, 2, 64, 256])
def test_matrix_is_its_own_inverse(size: int) -> None:
    matrix = hadamard.matrix(size)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-12)


def test_matrix_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="powers of two"):
        hadamard.matrix(12)


@pytest.mark.parametrize(
    ("size", "limit", "expected"), [(1536, 64, 64), (160, 64, 32), (33, 64, 1)]
)
def test_power_of_two_factor(size: int, limit: int, expected: int) -> None:
    assert hadamard.power_of_two_factor(size, limit=limit) == expected
