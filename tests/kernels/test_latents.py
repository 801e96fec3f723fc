"""Latents by themselves in C++: written to the cache, and read from there."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from edgellm.kernels import attention, rope
from edgellm.kernels.attention import reference
from edgellm.kernels.kv_append import reference as kv_append
from edgellm.kernels.kv_blocks import ROW_FORMATS, KVBlocks, KVFormat, allocate
from edgellm.kernels.latent.native import append_latents
from edgellm.kernels.rope import reference as turned

HEADS, ROTATED, RANK, TABLE, EPSILON, SCALE = 3, 16, 64, [2, 0], 0.1, 0.3
INV_FREQ = (100.0 ** (-np.arange(8) / 8)).tolist()
NORM = np.random.default_rng(0).standard_normal(RANK).astype(np.float32)


def rows_of(count: int) -> np.ndarray:
    width = (HEADS + 1) * (ROTATED + RANK)
    return np.random.default_rng(count).standard_normal((count, width)).astype(np.float32)


def pool(format: KVFormat) -> KVBlocks:
    sizes = {"blocks": 3, "layers": 2, "kv_heads": 1, "head_dim": ROTATED, "latent": RANK}
    return allocate(format=format, **sizes)


def appended(library: ctypes.CDLL, blocks: KVBlocks, rows: np.ndarray, start: int) -> np.ndarray:
    table, rule = rope.table(INV_FREQ, 200), {"norm": NORM, "epsilon": EPSILON}
    return append_latents(library, blocks, TABLE, 1, start, rows, table, **rule, threads=2)


def expected(rows: np.ndarray, format: KVFormat) -> np.ndarray:
    """What all rows attend to, in float64."""
    heads = rows.astype("f8").reshape(len(rows), HEADS + 1, -1)
    turn, rest = np.split(heads, [ROTATED], axis=2)
    turn = turned.apply(turn, INV_FREQ, 0, 1.0)
    latent = rest[:, -1:]
    latent = latent / np.sqrt((latent**2).mean(axis=-1, keepdims=True) + EPSILON) * NORM
    k = kv_append.round_trip(turn[:, -1:], format, key=True)
    latent = kv_append.round_trip(latent, format, key=False)
    q = np.concatenate([turn[:, :-1], rest[:, :-1]], axis=2)
    return reference.attend(q, np.concatenate([k, latent], axis=2), latent, 0, scale=SCALE)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.usefixtures("poisoned")
def test_what_is_written_is_attended_to(compiled: ctypes.CDLL, format: KVFormat) -> None:
    """Past the end of a block, cut anywhere, with the same bits."""
    rows, found = rows_of(150), []
    for cuts in ([0, 150], [0, 1, 70, 129, 150]):
        blocks, parts = pool(format), []
        for start, end in itertools.pairwise(cuts):
            q = appended(compiled, blocks, rows[start:end], start)
            out = attention.native.attend(compiled, blocks, TABLE, 1, q, start, scale=SCALE)
            parts.append(out)
        found.append(np.concatenate(parts))
    np.testing.assert_array_equal(*found)
    exact = expected(rows, format)
    limit = {"f32": 1e-5, "f16": 1e-3}.get(format, 0.03)
    assert np.abs(found[0] - exact).max() < limit * np.abs(exact).max()


def test_what_does_not_fit_is_refused(native_library: ctypes.CDLL) -> None:
    blocks, rows = pool("f32"), rows_of(2)
    plain = allocate(format="f32", blocks=3, layers=2, kv_heads=1, head_dim=ROTATED)
    for wrong, where, start, message in (
        (rows, plain, 0, "latents of 0 numbers"),
        (rows[:, :80], blocks, 0, "0 heads"),
        (rows[:, :-1], blocks, 0, "rows is float32"),
        (rows.astype("f8"), blocks, 0, "rows is float32"),
        (rows, blocks, 199, "RoPE table"),
        (rows, blocks, 255, "positions 255"),
    ):
        with pytest.raises(ValueError, match=message):
            appended(native_library, where, wrong, start)
