from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels import rope
from edgellm.kernels.rope import reference


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (80, 80), (96, 32), (2, 2)])
@pytest.mark.parametrize("start", [0, 1, 127, 8000])
@pytest.mark.usefixtures("poisoned")
def test_matches_reference(head_dim: int, rotated: int, start: int) -> None:
    x = np.random.default_rng(start).standard_normal((3, 5, head_dim)).astype(np.float32)
    inv_freq = (10000.0 ** (-np.arange(0, rotated, 2) / rotated)).tolist()
    found = rope.apply(x, rope.table(inv_freq, start + 3), start)
    np.testing.assert_allclose(found, reference.apply(x, inv_freq, start), atol=2e-6)


def test_position_zero_changes_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 8)).astype(np.float32)
    assert (rope.apply(x, rope.table([1.0, 0.1, 0.01, 0.001], 1), 0) == x).all()
