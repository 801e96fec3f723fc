from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels.kv_append import append, reference
from edgellm.kernels.kv_blocks import BLOCK, KV_FORMATS, allocate, block_bytes


@pytest.mark.parametrize("format", KV_FORMATS)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (127, 2), (100, 128), (5, 0), (250, 6)])
@pytest.mark.usefixtures("poisoned")
def test_rows_land_where_the_table_says(format: str, start: int, count: int) -> None:
    rng = np.random.default_rng(count)
    blocks = allocate(format=format, blocks=5, layers=2, kv_heads=3, head_dim=16)
    table = [4, 0, 2]
    k, v = rng.standard_normal((2, count, 3, 16)).astype(np.float32)
    append(blocks, table, 1, start, k, v)
    for values, stored, scales in ((k, blocks.k, blocks.k_scale), (v, blocks.v, blocks.v_scale)):
        expected = reference.round_trip(values, format)
        for i in range(count):
            block, row = table[(start + i) // BLOCK], (start + i) % BLOCK
            read = stored[block, 1, :, row].astype(np.float64)
            if scales is not None:
                read *= scales[block, 1, :, row, None]
            np.testing.assert_allclose(read, expected[i], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("poisoned")
def test_nothing_else_is_written() -> None:
    blocks = allocate(format="f32", blocks=2, layers=2, kv_heads=1, head_dim=4)
    ones = np.ones((3, 1, 4), np.float32)
    append(blocks, [1], 0, 10, ones, ones)
    written = ~np.isnan(blocks.k)
    assert written[1, 0, 0, 10:13].all()
    assert written.sum() == 12


def test_zero_rows_stay_zero() -> None:
    blocks = allocate(format="int8", blocks=1, layers=1, kv_heads=1, head_dim=8)
    zeros = np.zeros((1, 1, 8), np.float32)
    append(blocks, [0], 0, 0, zeros, zeros)
    assert not blocks.k[0, 0, 0, 0].any()
    assert blocks.k_scale is not None
    assert blocks.k_scale[0, 0, 0, 0] == 0


def test_int8_error_is_half_a_step() -> None:
    row = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    codes, scale = reference.quantize_row(row)
    assert np.abs(codes * scale - row).max() <= 0.5001 * scale


@pytest.mark.parametrize("format", KV_FORMATS)
def test_block_bytes_is_what_is_allocated(format: str) -> None:
    blocks = allocate(format=format, blocks=3, layers=2, kv_heads=3, head_dim=16)
    arrays = (blocks.k, blocks.v, blocks.k_scale, blocks.v_scale)
    size = sum(a.nbytes for a in arrays if a is not None)
    assert size == 3 * block_bytes(format=format, layers=2, kv_heads=3, head_dim=16)
