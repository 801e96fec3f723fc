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
from edgellm.kernels.kv_seal.reference import best_blocks, sealed_rows, with_sealed
from edgellm.kernels.sealed_blocks import LEAST_READ, allocate_sealed, sealed_end

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
@pytest.mark.parametrize(("query", "apart"), [(0.5, True), (-0.5, True), (1e-6, False)])
def test_the_largest_codes_fit_their_sums(
    use_isa: UseISA, format: KVFormat, query: float, apart: bool
) -> None:
    """Sums of few products have 16 bits with some instruction sets.

    Args:
        query: a small one makes all weights alike, and so as large as they may be.
        apart: whether every second value is the opposite of the others, which tells keys apart.
    """
    k, v = (np.zeros((4 * BLOCK, 1, 64), np.float32) for _ in range(2))
    k[:] = v[:, :, 0] = 1  # the transform makes all numbers of a value alike
    k[::2] = -1  # the least code of each channel, and the largest one
    if apart:
        v[::2] *= -1
    q = np.full((1, 3, 64), query, np.float32)
    q[..., 1:] *= 126.5 / 127  # the rest of their rounding is the largest as well
    expected = reference.attend(q, k, v, len(k) - 1)
    for isa in HERE:
        library = use_isa(isa)
        found = attend(library, filled(library, format, k, v), q, len(k) - 1)
        np.testing.assert_allclose(found, expected, atol=2e-3, rtol=0, err_msg=isa)


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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kv_read"),
    [
        (3, 1, 64, 512),
        (4, 2, 24, 768),
        (8, 1, 80, 512),
        pytest.param(4, 4, 8, 700, marks=pytest.mark.slow),
        pytest.param(2, 1, 256, 640, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_rows_read_the_best_blocks_alone(
    use_isa: UseISA, heads: int, kv_heads: int, head_dim: int, kv_read: int
) -> None:
    """As the reference says which they are; values of the other blocks are not read."""
    k, v = rows(8 * BLOCK, kv_heads, head_dim)
    k += 2 * np.random.default_rng(3).standard_normal((8, 1, 1, head_dim)).repeat(BLOCK, 0)[:, 0]
    k = k.astype(np.float32)
    q = np.random.default_rng(1).standard_normal((len(k), heads, head_dim)).astype(np.float32)
    q *= 4 / np.linalg.norm(k, axis=-1).mean()
    group, read, expected = heads // kv_heads, {}, {}
    hot = [round_trip(each, "k4v4", key=each is k) for each in (k, v)]
    for position in (511, 512, 767, 768, 1000, 1023):
        held = [
            with_sealed(each, kept, "k4v4", position, key=each is k)
            for each, kept in zip((k, v), hot, strict=True)
        ]
        of_heads = [
            best_blocks(q[position, h * group : (h + 1) * group], held[0][:, h], position, kv_read)
            for h in range(kv_heads)
        ]
        read[position], found = of_heads, []
        for h, blocks in enumerate(of_heads):
            seen = np.concatenate([np.arange(n * BLOCK, (n + 1) * BLOCK) for n in blocks])
            seen = seen[seen <= position]
            part = q[position][None, h * group : (h + 1) * group]
            of_head = [each[seen][:, h : h + 1] for each in held]
            found.append(reference.attend(part, *of_head, len(seen) - 1)[0])
        expected[position] = np.concatenate(found)
    for isa in HERE:
        library = use_isa(isa)
        blocks = filled(library, "k4v4", k, v)
        for position, needed in expected.items():
            row = q[position][None]
            found = attend(library, blocks, row, position, kv_read=kv_read)
            # a code of V between two numbers may fall to either
            np.testing.assert_allclose(found[0], needed, atol=2e-3, rtol=0, err_msg=isa)
        for position in (1023, 768):  # from the later one on, blocks are lost
            before = attend(library, blocks, q[position][None], position, kv_read=kv_read)
            lose(blocks, read[position], sealed_end(position + 1))
            found = attend(library, blocks, q[position][None], position, kv_read=kv_read)
            np.testing.assert_array_equal(found, before, err_msg=isa)
            blocks = filled(library, "k4v4", k, v)


def lose(blocks: KVBlocks, read: list[list[int]], end: int) -> None:
    """Break the values of sealed blocks, where KV heads do not read."""
    assert blocks.sealed is not None
    for head, numbers in enumerate(read):
        for number in set(range(1, end)) - set(numbers):
            block = SEALED_TABLE[number]
            blocks.sealed.v[block, 1, head] = 255
            blocks.sealed.v_scale[block, 1, head] = np.nan


def test_enough_to_read_is_all(compiled: ctypes.CDLL) -> None:
    """To the bit, and less has the same bits in any company."""
    k, v = rows(8 * BLOCK, 2, 32)
    blocks = filled(compiled, "k4v4", k, v)
    q = np.random.default_rng(1).standard_normal((len(k), 6, 32)).astype(np.float32)
    every = attend(compiled, blocks, q, 0)
    np.testing.assert_array_equal(attend(compiled, blocks, q, 0, kv_read=8 * BLOCK), every)
    whole = attend(compiled, blocks, q, 0, kv_read=LEAST_READ, threads=2)
    np.testing.assert_array_equal(whole[:LEAST_READ], every[:LEAST_READ])
    assert np.abs(whole[LEAST_READ:] - every[LEAST_READ:]).max(axis=(1, 2)).min() > 1e-3
    for start, count in ((600, 1), (700, 80), (1023, 1)):
        part = attend(compiled, blocks, q[start : start + count], start, kv_read=LEAST_READ)
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
            "511 tokens to read of k4v4 for 1 heads",
            lambda: attend(native_library, blocks, q, 3 * BLOCK, kv_read=511),
        ),
        (
            "4294967808 tokens to read of k4v4",
            lambda: attend(native_library, blocks, q, 3 * BLOCK, kv_read=2**32 + 512),
        ),
        (
            "a window of 9 and blocks that are left out",
            lambda: attend(native_library, blocks, q, 3 * BLOCK, kv_read=512, window=9),
        ),
        (
            "1024 tokens to read of k8v4",
            lambda: attend(native_library, pool("k8v4", 1, 16), q, 0, kv_read=1024),
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
    """The reference loses little of each channel, and of each row of V.

    Four levels lose at least 0.343 of normally distributed numbers."""
    k, v = rows(BLOCK, 2, 32)
    lost = sealed_rows(k, "k4v4", key=True) - k
    assert np.sqrt(np.square(lost).mean()) < 0.13 * np.sqrt(np.square(k - k.mean(0)).mean())
    for format, share in (("k4v4", 0.13), ("k4v2", 0.345)):
        lost = sealed_rows(v, format, key=False) - v
        assert np.sqrt(np.square(lost).mean()) < share * np.sqrt(np.square(v).mean())
