from __future__ import annotations

import numpy as np
import pytest

from edgellm.kernels.attention import attend, portable, reference
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks, allocate

SHAPES = [
    # start, tokens, heads, kv_heads, head_dim
    (0, 1, 1, 1, 64),
    (0, 63, 9, 3, 64),
    (62, 1, 8, 1, 80),
    (64, 1, 6, 6, 96),
    (1, 126, 4, 2, 32),
    (127, 1, 5, 1, 128),
    (120, 17, 7, 7, 16),
    (255, 130, 6, 2, 256),
]


def read_back(blocks: KVBlocks, table: list[int], name: str, length: int) -> np.ndarray:
    """What layer 1 of the cache holds, `[length, Hkv, D]` float64."""
    rows = []
    for position in range(length):
        block, row = table[position // BLOCK], position % BLOCK
        values = getattr(blocks, name)[block, 1, :, row].astype(np.float64)
        scale = getattr(blocks, f"{name}_scale")
        rows.append(values if scale is None else values * scale[block, 1, :, row, None])
    return np.stack(rows)


def compare(shape: tuple[int, ...], format: str, window: int | None, tolerance: float) -> None:
    start, tokens, heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(sum(shape))
    length = start + tokens
    blocks = allocate(format=format, blocks=6, layers=2, kv_heads=kv_heads, head_dim=head_dim)
    table = [3, 5, 0, 4]
    k, v = rng.standard_normal((2, length, kv_heads, head_dim)).astype(np.float32)
    q = rng.standard_normal((tokens, heads, head_dim)).astype(np.float32)
    append(blocks, table, 1, 0, k, v)
    found = attend(blocks, table, 1, q, start, window=window)
    stored = [read_back(blocks, table, values, length) for values in ("k", "v")]
    expected = reference.attend(q, *stored, start, window=window)
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", ["f32", "f16", "int8"])
@pytest.mark.usefixtures("poisoned")
def test_matches_reference(shape: tuple[int, ...], format: str) -> None:
    compare(shape, format, None, 3e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [1, 5, 64])
@pytest.mark.usefixtures("poisoned")
def test_sliding_window(shape: tuple[int, ...], window: int) -> None:
    compare(shape, "f32", window, 3e-6)


@pytest.mark.usefixtures("poisoned")
def test_one_kv_head_at_a_time_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "_SCORE_BYTES", 1)
    compare((255, 130, 6, 2, 64), "int8", None, 3e-6)


def test_huge_scores_stay_finite() -> None:
    blocks = allocate(format="f32", blocks=1, layers=1, kv_heads=1, head_dim=8)
    k = np.full((4, 1, 8), 1e4, np.float32)
    append(blocks, [0], 0, 0, k, k)
    found = attend(blocks, [0], 0, np.full((4, 1, 8), 1e4, np.float32), 0)
    np.testing.assert_allclose(found, 1e4, rtol=1e-6)
