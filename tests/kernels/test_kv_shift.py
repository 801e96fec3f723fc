from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels.hadamard import reference as hadamard
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK, ROW_FORMATS, KVBlocks, allocate
from edgellm.kernels.kv_shift import move, reference

INV_FREQ = ((1.0, 0.3, 0.01), (0.7, 0.0, 0.2))  # by layer; 6 of 16 dimensions are rotated


def keys(blocks: KVBlocks, block: int, layer: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """One token's keys `[Hkv, D]` and the largest rounding error of each head."""
    found = blocks.key_rows(block, layer, row).astype(np.float64)
    if blocks.k_scale is None:
        return found, np.full(len(found), 2e-6 if blocks.format == "f32" else 4e-3)
    scale = blocks.k_scale[block, layer, :, row].astype(np.float64)
    found *= scale[:, None]
    # an error in each of D numbers may meet in one of them after the transform
    return hadamard.transform(found), scale * 0.501 * np.sqrt(found.shape[1])


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize(
    ("start", "count", "row", "distance"),
    [
        (5, 1, 0, 5),
        (130, 120, 8, 122),
        (100, 60, 40, 60),
        (128, 128, 0, 128),
        (250, 6, 122, 256),
        (3, 250, 5, -700),
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_rows_are_what_they_would_be_there(
    format: str, start: int, count: int, row: int, distance: int
) -> None:
    rng = np.random.default_rng(start)
    blocks = allocate(format=format, blocks=5, layers=2, kv_heads=3, head_dim=16)
    table = [4, 0]
    for layer in range(2):
        append(blocks, table, layer, 0, *rng.standard_normal((2, 256, 3, 16)).astype(np.float32))
    move(blocks, table, start, count, targets=[2, 3], row=row, distance=distance, inv_freq=INV_FREQ)
    for layer in range(2):
        for i in range(count):
            block, at = table[(start + i) // BLOCK], (start + i) % BLOCK
            target, to = 2 + (row + i) // BLOCK, (row + i) % BLOCK
            before, _ = keys(blocks, block, layer, at)
            after, error = keys(blocks, target, layer, to)
            expected = reference.move(before[None], distance, INV_FREQ[layer])[0]
            assert (np.abs(after - expected).max(axis=1) <= error).all()
            assert (
                blocks.value_rows(target, layer, to) == blocks.value_rows(block, layer, at)
            ).all()
            if blocks.v_scale is not None:
                assert (
                    blocks.v_scale[target, layer, :, to] == blocks.v_scale[block, layer, :, at]
                ).all()


def test_keys_with_an_offset_turn_without_it() -> None:
    rng = np.random.default_rng(0)
    sizes = {"format": "f32", "blocks": 3, "layers": 2, "kv_heads": 3, "head_dim": 16}
    offset = 100 * rng.standard_normal((2, 3, 16)).astype(np.float32)
    plain, less = allocate(**sizes), allocate(**sizes, key_offset=offset)
    k, v = rng.standard_normal((2, 100, 3, 16)).astype(np.float32)
    for blocks in (plain, less):
        for layer in range(2):
            append(blocks, [1], layer, 0, k, v)
        move(blocks, [1], 40, 50, targets=[0], row=7, distance=33, inv_freq=INV_FREQ)
    for layer in range(2):
        for row in range(7, 57):
            found = less.key_rows(0, layer, row) + offset[layer]
            np.testing.assert_allclose(found, plain.key_rows(0, layer, row), atol=1e-4)


@pytest.mark.usefixtures("poisoned")
def test_nothing_else_is_written() -> None:
    blocks = allocate(format="f32", blocks=3, layers=1, kv_heads=1, head_dim=8)
    ones = np.ones((128, 1, 8), np.float32)
    append(blocks, [0], 0, 0, ones, ones)
    move(blocks, [0], 10, 4, targets=[2], row=3, distance=7, inv_freq=[(1.0,)])
    written = np.isfinite(blocks.v[2, 0]).transpose(0, 1, 3, 2).reshape(BLOCK, 8).all(axis=1)
    assert np.flatnonzero(written).tolist() == [3, 4, 5, 6]
    assert np.isnan(blocks.v[1]).all()
