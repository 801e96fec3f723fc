from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from instruction_sets import HERE

from edgellm.kernels import rope
from edgellm.kernels.hadamard import reference as hadamard
from edgellm.kernels.kv_append import (
    HeadNorms,
    append,
    append_rotated,
    native,
    portable,
    reference,
)
from edgellm.kernels.kv_blocks import (
    BLOCK,
    ROW_FORMATS,
    SCALED,
    KVBlocks,
    allocate,
    block_bytes,
)
from edgellm.kernels.rope import reference as rope_reference
from edgellm.kernels.step import reference as step_reference

AppendRotated = Callable[..., np.ndarray]


@pytest.fixture(params=["portable", *HERE, "2 threads"])
def implementation(request: pytest.FixtureRequest) -> AppendRotated:
    """Each implementation that this machine has, in turn."""
    if request.param == "portable":
        return portable.append_rotated
    if request.param == "2 threads":
        return functools.partial(append_rotated, threads=2)
    return functools.partial(
        native.append_rotated, request.getfixturevalue("use_isa")(request.param)
    )


def stored_row(blocks: KVBlocks, name: str, block: int, row: int, layer: int = 1) -> np.ndarray:
    """One token's row as it lies in the cache, `[Hkv, D]`."""
    return (blocks.key_rows if name == "k" else blocks.value_rows)(block, layer, row)


def spread(format: str, name: str) -> bool:
    """Whether rows are rounded after the Hadamard transform."""
    return format == "int8" and name == "k"


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (127, 2), (100, 128), (5, 0), (250, 6)])
@pytest.mark.usefixtures("poisoned")
def test_rows_land_where_the_table_says(format: str, start: int, count: int) -> None:
    rng = np.random.default_rng(count)
    blocks = allocate(format=format, blocks=5, layers=2, kv_heads=3, head_dim=16)
    table = [4, 0, 2]
    k, v = rng.standard_normal((2, count, 3, 16)).astype(np.float32)
    append(blocks, table, 1, start, k, v)
    for name, values, scales in (("k", k, blocks.k_scale), ("v", v, blocks.v_scale)):
        expected = reference.round_trip(values, format, key=name == "k")
        for i in range(count):
            block, row = table[(start + i) // BLOCK], (start + i) % BLOCK
            read = stored_row(blocks, name, block, row).astype(np.float64)
            if scales is not None:
                read *= scales[block, 1, :, row, None]
            if spread(format, name):
                read = hadamard.transform(read)
            np.testing.assert_allclose(read, expected[i], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("poisoned")
def test_nothing_else_is_written() -> None:
    blocks = allocate(format="f32", blocks=2, layers=2, kv_heads=1, head_dim=4)
    ones = np.ones((3, 1, 4), np.float32)
    append(blocks, [1], 0, 10, ones, ones)
    written = ~np.isnan(blocks.k)
    assert written.sum() == (~np.isnan(blocks.v)).sum() == 12
    for row in (10, 11, 12):
        assert (blocks.key_rows(1, 0, row) == 1).all()
        assert (blocks.value_rows(1, 0, row) == 1).all()


@pytest.mark.parametrize("format", SCALED)
def test_zero_rows_stay_zero(implementation: AppendRotated, format: str) -> None:
    blocks = allocate(format=format, blocks=1, layers=1, kv_heads=1, head_dim=8)
    table = rope.table([1.0, 0.1, 0.01, 0.001], 1)
    q = implementation(blocks, [0], 0, 0, np.zeros((1, 4, 8), np.float32), table)
    assert not q.any()
    for scale in (blocks.k_scale, blocks.v_scale):
        assert scale is not None
        assert scale[0, 0, 0, 0] == 0


def test_int8_error_is_half_a_step() -> None:
    row = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    codes, scale = reference.quantize_row(row)
    assert np.abs(codes * scale - row).max() <= 0.5001 * scale


def test_a_large_number_in_a_key_leaves_the_others_their_bits() -> None:
    """As in Qwen2's keys: one of 64 is 50 times as large as the rest."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 100, 2, 64)).astype(np.float32)
    k[:, :, 5] += 50
    q = rng.standard_normal((1000, 64))
    stored, raw = (reference.round_trip(k, "int8", key=key) for key in (True, False))
    lost, before = (np.std(q @ (rows - k).reshape(-1, 64).T) for rows in (stored, raw))
    assert lost < 0.4 * before
    np.testing.assert_array_equal(
        reference.round_trip(v, "int8", key=False)[0, 0],
        np.multiply(*reference.quantize_row(v[0, 0]), dtype=np.float64),
    )


@pytest.mark.parametrize("format", SCALED)
def test_rows_have_the_same_bits_however_many_come(
    implementation: AppendRotated, format: str
) -> None:
    rng = np.random.default_rng(1)
    qkv = rng.standard_normal((150, 6, 80)).astype(np.float32)
    table = rope.table((10000.0 ** (-np.arange(40) / 40)).tolist(), 150)
    whole, parts = (
        allocate(format=format, blocks=2, layers=1, kv_heads=2, head_dim=80) for _ in range(2)
    )
    for blocks in (whole, parts):
        blocks.clear([0, 1])
    implementation(whole, [1, 0], 0, 0, qkv, table)
    for first, end in ((0, 1), (1, 4), (4, 127), (127, 150)):
        implementation(parts, [1, 0], 0, first, qkv[first:end], table)
    for ours, theirs in zip(parts.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_block_bytes_is_what_is_allocated(format: str) -> None:
    blocks = allocate(format=format, blocks=3, layers=2, kv_heads=3, head_dim=16)
    arrays = (blocks.k, blocks.v, blocks.k_scale, blocks.v_scale)
    size = sum(a.nbytes for a in arrays if a is not None)
    assert size == 3 * block_bytes(format=format, layers=2, kv_heads=3, head_dim=16)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize(
    ("start", "tokens", "heads", "kv_heads", "head_dim", "rotated"),
    [
        (0, 1, 9, 3, 64, 64),
        (127, 2, 1, 1, 80, 80),
        (100, 131, 8, 2, 96, 32),
        (5, 63, 5, 5, 16, 16),
        (255, 1, 6, 2, 256, 256),
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_rotated_rows(
    implementation: AppendRotated,
    format: str,
    start: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
) -> None:
    rng = np.random.default_rng(tokens)
    qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    inv_freq = (10000.0 ** (-np.arange(0, rotated, 2) / rotated)).tolist()
    blocks = allocate(format=format, blocks=4, layers=2, kv_heads=kv_heads, head_dim=head_dim)
    table = [3, 1, 0]
    q = implementation(blocks, table, 1, start, qkv, rope.table(inv_freq, start + tokens))
    exact = rope_reference.apply(qkv[:, : heads + kv_heads], inv_freq, start)
    np.testing.assert_allclose(q, exact[:, :heads], atol=3e-6)
    for name, values in (("k", exact[:, heads:]), ("v", qkv[:, heads + kv_heads :])):
        scales = getattr(blocks, f"{name}_scale")
        for t in range(tokens):
            block, row = table[(start + t) // BLOCK], (start + t) % BLOCK
            found = stored_row(blocks, name, block, row).astype(np.float64)
            allowed: np.ndarray | float = 3e-6 if format == "f32" else 2.0**-9
            exact = hadamard.transform(values[t]) if spread(format, name) else values[t]
            if scales is not None:
                scale = scales[block, 1, :, row, None]
                np.testing.assert_allclose(scale[:, 0], np.abs(exact).max(-1) / 127, rtol=1e-5)
                found, allowed = found * scale, 0.501 * scale
            assert (np.abs(found - exact) <= allowed).all()


@pytest.mark.parametrize("head_dim", [16, 36, 80])
@pytest.mark.parametrize("kind", ["head", "width", "head_after_rope", "head and values"])
@pytest.mark.usefixtures("poisoned")
def test_norms_of_q_and_k(implementation: AppendRotated, kind: str, head_dim: int) -> None:
    """As if rows had been normalized before, or behind RoPE; values too, or as they were."""
    rng = np.random.default_rng(head_dim)
    heads, kv_heads, tokens, start = 6, 2, 70, 100
    qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    sizes = (heads * head_dim, kv_heads * head_dim) if kind == "width" else (head_dim, head_dim)
    q_weight, k_weight = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    after = kind == "head_after_rope"
    values = kind == "head and values"
    norms = HeadNorms(q=q_weight, k=k_weight, epsilon=0.1, after_rope=after, values=values)
    inv_freq = (100.0 ** (-np.arange(0, 12, 2) / 12)).tolist()
    table = rope.table(inv_freq, start + tokens, magnitude=1.5)
    blocks = allocate(format="f32", blocks=3, layers=2, kv_heads=kv_heads, head_dim=head_dim)
    options = {"norms": norms, "queries_alone": True}
    alone = implementation(blocks, [2, 0], 1, start, qkv[:, :heads], table, **options)
    assert all(np.isnan(array).all() for array in blocks.arrays)  # nothing is written
    q = implementation(blocks, [2, 0], 1, start, qkv, table, norms=norms)
    np.testing.assert_array_equal(alone, q)
    expected = []
    for rows, weight in ((qkv[:, :heads], q_weight), (qkv[:, heads:-kv_heads], k_weight)):
        exact = rows if after else step_reference.head_norm(rows.astype(float), weight, 0.1)
        exact = rope_reference.apply(exact, inv_freq, start, 1.5)
        expected.append(step_reference.head_norm(exact, weight, 0.1) if after else exact)
    np.testing.assert_allclose(q, expected[0], atol=1e-5)
    v = qkv[:, -kv_heads:].astype(float)
    if values:
        v = step_reference.head_norm(v, np.ones(head_dim, np.float32), 0.1)
    for name, exact in (("k", expected[1]), ("v", v)):
        for t in range(tokens):
            block, row = [2, 0][(start + t) // BLOCK], (start + t) % BLOCK
            np.testing.assert_allclose(stored_row(blocks, name, block, row), exact[t], atol=1e-5)


def test_norms_that_do_not_fit_are_refused(implementation: AppendRotated) -> None:
    blocks = allocate(format="f32", blocks=1, layers=1, kv_heads=1, head_dim=16)
    qkv = np.ones((1, 4, 16), np.float32)
    ones = {size: np.ones(size, np.float32) for size in (16, 32)}
    for norms in (
        HeadNorms(q=ones[16], k=ones[32], epsilon=1e-5),
        HeadNorms(q=ones[32], k=ones[16], epsilon=1e-5, after_rope=True),
        HeadNorms(q=ones[16].astype(np.float64), k=ones[16], epsilon=1e-5),
    ):
        with pytest.raises(ValueError, match="norms of Q and K"):
            implementation(blocks, [0], 0, 0, qkv, rope.table([1.0] * 8, 1), norms=norms)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.usefixtures("poisoned")
def test_keys_are_stored_less_their_offset(implementation: AppendRotated, format: str) -> None:
    """As other keys would be without one; values and queries know of none."""
    rng = np.random.default_rng(0)
    sizes = {"format": format, "blocks": 2, "layers": 3, "kv_heads": 2, "head_dim": 16}
    offset = rng.standard_normal((3, 2, 16)).astype(np.float32)
    # no rotation, so that the offset can as well be taken before it
    table = rope.RopeTable(np.ones((200, 6), np.float32), np.zeros((200, 6), np.float32))
    qkv = rng.standard_normal((70, 4 + 2 * 2, 16)).astype(np.float32)
    less = qkv.copy()
    less[:, 4:6] -= offset[1]
    found, expected = allocate(**sizes, key_offset=offset), allocate(**sizes)
    q = implementation(found, [1, 0], 1, 90, qkv, table)
    np.testing.assert_array_equal(q, implementation(expected, [1, 0], 1, 90, less, table))
    np.testing.assert_array_equal(q, qkv[:, :4])
    for ours, theirs in zip(found.arrays, expected.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_offset_of_another_shape_is_refused() -> None:
    sizes = {"format": "int8", "blocks": 1, "layers": 2, "kv_heads": 1, "head_dim": 8}
    for wrong in (np.zeros((2, 1, 4), np.float32), np.zeros((2, 1, 8))):
        with pytest.raises(ValueError, match=r"key_offset is float32 \(2, 1, 8\)"):
            allocate(**sizes, key_offset=wrong)


@pytest.mark.parametrize("format", ["int8", "f32"])
def test_broken_rows_show(implementation: AppendRotated, format: str) -> None:
    """NaN must not be quantized into something that looks like a value."""
    qkv = np.ones((1, 3, 8), np.float32)
    qkv[0, 1:, 3] = np.nan
    blocks = allocate(format=format, blocks=1, layers=1, kv_heads=1, head_dim=8)
    with np.errstate(invalid="ignore"):
        implementation(blocks, [0], 0, 0, qkv, rope.table([1.0, 0.1, 0.01, 0.001], 1))
    for name, scales in (("k", blocks.k_scale), ("v", blocks.v_scale)):
        row = stored_row(blocks, name, 0, 0, layer=0)
        assert np.isnan(row if scales is None else scales[0, 0, 0, 0]).any()
