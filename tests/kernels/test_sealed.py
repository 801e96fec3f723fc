from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
from instruction_sets import HERE, UseISA

from edgellm.kernels.attention import native, reference
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_append.reference import round_trip
from edgellm.kernels.kv_blocks import BLOCK, SEALED, KVBlocks, KVFormat, allocate
from edgellm.kernels.kv_seal import native as sealing
from edgellm.kernels.kv_seal.reference import sealed_rows
from edgellm.kernels.sealed_blocks import allocate_sealed, sealed_end

TABLE, SEALED_TABLE = [3, 5, 0, 4, 1, 7, 2, 8], [0, 2, 5, 1, 3, 4]


def rows(length: int, kv_heads: int, head_dim: int) -> list[np.ndarray]:
    """K with channels of very different middles and ranges, as RoPE leaves them, and V."""
    rng = np.random.default_rng(head_dim + length)
    k, v = rng.standard_normal((2, length, kv_heads, head_dim)).astype(np.float32)
    middle, size = rng.standard_normal((2, kv_heads, head_dim)).astype(np.float32)
    k = k * np.exp(size) + 3 * middle
    k[:, :, -1] = 0.25  # a channel without a range
    return [k, v]


def pool(format: KVFormat, kv_heads: int, head_dim: int) -> KVBlocks:
    sizes = {"layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
    sealed = allocate_sealed(format=format, blocks=6, **sizes)
    return allocate(format=format, blocks=9, sealed=sealed, **sizes)


def filled(
    library: ctypes.CDLL, format: KVFormat, k: np.ndarray, v: np.ndarray, threads: int = 1
) -> KVBlocks:
    blocks = pool(format, *k.shape[1:])
    append(blocks, TABLE, 1, 0, k, v)
    seal = functools.partial(sealing.seal, library, blocks, TABLE, SEALED_TABLE, 1)
    seal(range(1, sealed_end(len(k))), threads=threads)
    return blocks


def attend(
    library: ctypes.CDLL, blocks: KVBlocks, q: np.ndarray, start: int, **rules: float
) -> np.ndarray:
    return native.attend(library, blocks, TABLE, 1, q, start, sealed=SEALED_TABLE, **rules)


@pytest.mark.parametrize("format", SEALED)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(3, 1, 64), (4, 4, 8), (4, 2, 24), (8, 1, 80), (2, 1, 256)],
)
@pytest.mark.usefixtures("poisoned")
def test_rows_read_hot_and_sealed_blocks_as_the_reference_does(
    use_isa: UseISA, format: KVFormat, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Rows on both sides of the ends of blocks, and of splits of the keys; none of what they read
    was there before."""
    k, v = rows(5 * BLOCK + 2, kv_heads, head_dim)
    hot = [round_trip(each, format, key=each is k) for each in (k, v)]
    sealed = [each.copy() for each in hot]
    for part in (slice(at, at + BLOCK) for at in range(BLOCK, 4 * BLOCK, BLOCK)):
        for each, of in zip((k, v), sealed, strict=True):
            of[part] = sealed_rows(each[part], format, key=each is k)
    q = np.random.default_rng(1).standard_normal((len(k), heads, head_dim)).astype(np.float32)
    q *= 4 / np.linalg.norm(k, axis=-1).mean()
    spans = [(0, 2), (255, 257), (383, 385), (510, 514), (639, 642)]
    expected = {}
    for position in (position for span in spans for position in range(*span)):
        cold = slice(BLOCK, sealed_end(position + 1) * BLOCK)
        held = [each[: position + 1].copy() for each in hot]
        for read, of in zip(held, sealed, strict=True):
            read[cold] = of[cold]
        expected[position] = reference.attend(q[position][None], *held, position)[0]
    for isa in HERE:
        library = use_isa(isa)
        blocks = filled(library, format, k, v)
        for start, end in spans:
            found = attend(library, blocks, q[start:end], start)
            needed = [expected[position] for position in range(start, end)]
            np.testing.assert_allclose(found, needed, atol=4e-4, rtol=0, err_msg=isa)


@pytest.mark.parametrize("format", SEALED)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("poisoned", "eight_cores")
def test_company_makes_no_difference(compiled: ctypes.CDLL, format: KVFormat, threads: int) -> None:
    k, v = rows(5 * BLOCK + 2, 2, 32)
    blocks = filled(compiled, format, k, v, threads)
    q = np.random.default_rng(1).standard_normal((len(k), 6, 32)).astype(np.float32)
    whole = attend(compiled, blocks, q, 0, threads=threads)
    for start, count in ((0, 1), (200, 180), (383, 2), (384, 1), (510, 132)):
        part = attend(compiled, blocks, q[start : start + count], start, threads=threads)
        np.testing.assert_array_equal(part, whole[start : start + count])


@pytest.mark.parametrize("format", SEALED)
def test_a_broken_number_shows(compiled: ctypes.CDLL, format: KVFormat) -> None:
    k, v = rows(4 * BLOCK, 1, 16)
    k[BLOCK + 5, 0, 3] = np.inf
    v[BLOCK + 9, 0, 3] = np.nan
    with np.errstate(invalid="ignore"):
        blocks = filled(compiled, format, k, v)
    found = attend(compiled, blocks, np.ones((1, 1, 16), np.float32), 4 * BLOCK - 1)
    assert np.isnan(found).all()


@pytest.mark.usefixtures("native_library")
def test_what_does_not_fit_is_refused(native_library: ctypes.CDLL) -> None:
    blocks = pool("k4v4", 1, 16)
    k, v = rows(4 * BLOCK, 1, 16)
    append(blocks, TABLE, 1, 0, k, v)
    q = np.ones((1, 1, 16), np.float32)
    refusals = [
        (
            "needed are those before 2",
            lambda: native.attend(native_library, blocks, TABLE, 1, q, 3 * BLOCK, sealed=[0]),
        ),
        (
            "sealed block id is from 0 to 5",
            lambda: native.attend(native_library, blocks, TABLE, 1, q, 3 * BLOCK, sealed=[0, 6]),
        ),
        (
            "2 layers",
            lambda: sealing.seal(native_library, blocks, TABLE, SEALED_TABLE, 2, range(1, 2)),
        ),
        (
            "table of 6 sealed blocks",
            lambda: sealing.seal(native_library, blocks, TABLE, SEALED_TABLE, 1, range(6, 7)),
        ),
        (
            "int8 seals no blocks",
            lambda: allocate_sealed(format="int8", blocks=1, layers=1, kv_heads=1, head_dim=8),
        ),
    ]
    for message, call in refusals:
        with pytest.raises(ValueError, match=message):
            call()


def test_sealed_rows_are_near() -> None:
    """Of the reference itself: what 4 bits lose of each channel, and of each row of V."""
    k, v = rows(BLOCK, 2, 32)
    lost = sealed_rows(k, "k4v4", key=True) - k
    assert np.sqrt(np.square(lost).mean()) < 0.13 * np.sqrt(np.square(k - k.mean(0)).mean())
    lost = sealed_rows(v, "k4v4", key=False) - v
    assert np.sqrt(np.square(lost).mean()) < 0.13 * np.sqrt(np.square(v).mean())
