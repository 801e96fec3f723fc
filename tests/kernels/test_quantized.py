from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from random_weights import random_weight

from edgellm.kernels.quantized import KINDS, concatenate, dequantize, row_slices


@pytest.mark.parametrize("kind", KINDS)
def test_formula(kind: str) -> None:
    """One number after the other, in float64."""
    traits = KINDS[kind]
    weight = random_weight(kind, 3, 2 * traits.inputs_multiple, np.random.default_rng(1))
    values = dequantize(weight)
    for n, k in [(0, 0), (1, 17), (2, 31), (0, 32), (2, values.shape[1] - 1)]:
        code = int(weight.codes[n, k])
        number = traits.table[code] if traits.table else code - traits.zero
        scale = float(weight.scale[n, k // traits.group])
        offset = 0.0 if weight.offset is None else float(weight.offset[n, k // 32])
        if weight.block_scale is not None:
            scale *= float(weight.block_scale[n, k // 256])
        if weight.block_offset is not None:
            offset *= -float(weight.block_offset[n, k // 256])
        expected = number * scale + offset
        assert values[n, k] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_concatenate(kind: str) -> None:
    weight = random_weight(kind, 10, KINDS[kind].inputs_multiple, np.random.default_rng(2))
    halves = [weight.rows(slice(0, 4)), weight.rows(slice(4, 10))]
    np.testing.assert_array_equal(dequantize(concatenate(halves)), dequantize(weight))
    order = np.array([3, 9, 3])
    np.testing.assert_array_equal(dequantize(weight.rows(order)), dequantize(weight)[order])


def test_arrays_that_do_not_fit() -> None:
    weight = random_weight("int6_k", 4, 256, np.random.default_rng(3))
    with pytest.raises(ValueError, match=r"scale of int6_k is int8 \(4, 15\); needed is int8"):
        replace(weight, scale=weight.scale[:, 1:])
    with pytest.raises(ValueError, match="block_scale of int6_k is None"):
        replace(weight, block_scale=None)
    with pytest.raises(ValueError, match="offset of int6_k is float16"):
        replace(weight, offset=weight.block_scale)
    with pytest.raises(ValueError, match="32 inputs are not groups of 256"):
        replace(weight, codes=weight.codes[:, :32])
    other = random_weight("int4_k", 4, 256, np.random.default_rng(3))
    with pytest.raises(ValueError, match="different kinds: int6_k, int4_k"):
        concatenate([weight, other])


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (49_152, 576), (17, 1 << 21)])
def test_slices_are_all_rows(rows: int, columns: int) -> None:
    slices = list(row_slices(rows, columns))
    assert [i for s in slices for i in range(rows)[s]] == list(range(rows))
    assert all(s.start % 16 == 0 for s in slices)
