from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels.quantized import dequantize
from edgellm.quantize.weights import quantize_int4


def test_error_is_half_a_step() -> None:
    weight = np.random.default_rng(0).standard_normal((9, 96)).astype(np.float32)
    rounded = quantize_int4(weight)
    step = np.repeat(rounded.scales(), 32, axis=1)
    assert (np.abs(dequantize(rounded) - weight) <= 0.501 * step).all()


@pytest.mark.parametrize("value", [0.0, 3.5, -0.125])
def test_constant_groups_are_exact(value: float) -> None:
    weight = np.full((2, 32), value, np.float32)
    assert (dequantize(quantize_int4(weight)) == weight).all()


def test_values_on_the_grid_are_exact() -> None:
    weight = np.arange(32, dtype=np.float32)[None] % 16 * 0.5 - 2
    assert (dequantize(quantize_int4(weight)) == weight).all()
