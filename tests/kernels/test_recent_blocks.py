"""Pools whose rows see the first block and the last ones alone."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from instruction_sets import HERE, UseISA

from edgellm.kernels.attention import attend, native, reference
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_append.reference import round_trip
from edgellm.kernels.kv_blocks import BLOCK, ROW_FORMATS, KVBlocks, KVFormat, allocate
from edgellm.kernels.sealed_blocks import allocate_sealed

LENGTH, RECENT = 7 * BLOCK + 5, 2
TABLE = [3, 5, 0, 4, 1, 7, 2, 8]


def filled(format: KVFormat, k: np.ndarray, v: np.ndarray) -> KVBlocks:
    sizes = {"layers": 2, "kv_heads": k.shape[1], "head_dim": k.shape[2]}
    blocks = allocate(format=format, blocks=9, recent=RECENT, **sizes)
    append(blocks, TABLE, 1, 0, k, v)
    return blocks


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.usefixtures("poisoned")
def test_rows_see_the_first_block_and_the_last_ones(use_isa: UseISA, format: KVFormat) -> None:
    """Also in a chunk over the ends of blocks, and nothing of the others is read."""
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, LENGTH, 2, 24)).astype(np.float32)
    q = rng.standard_normal((LENGTH, 6, 24)).astype(np.float32)
    sinks = rng.standard_normal(6).astype(np.float32)
    held = [round_trip(each, format, key=each is k) for each in (k, v)]
    positions = [5, 255, 256, 383, 384, 385, 511, 512, 895, 896, LENGTH - 1]
    expected = []
    for position in positions:
        seen = np.arange(position + 1)
        seen = seen[(seen < BLOCK) | (seen // BLOCK > position // BLOCK - RECENT)]
        part = [each[seen] for each in held]
        row = reference.attend(q[position][None], *part, len(seen) - 1, softcap=5.0, sinks=sinks)
        expected.append(row[0])
    for isa in HERE:
        library, blocks = use_isa(isa), filled(format, k, v)

        def run(
            start: int,
            count: int,
            threads: int,
            *,
            on: KVBlocks = blocks,
            by: ctypes.CDLL = library,
        ) -> np.ndarray:
            rows, rules = q[start : start + count], {"softcap": 5.0, "sinks": sinks}
            return native.attend(by, on, TABLE, 1, rows, start, threads=threads, **rules)

        whole = run(0, LENGTH, 2)
        np.testing.assert_allclose(whole[positions], expected, atol=4e-4, rtol=0, err_msg=isa)
        for array in blocks.arrays:  # what the last block does not see
            array[TABLE[1 : 8 - RECENT]] = np.nan if array.dtype.kind == "f" else 77
        for start, count in ((LENGTH - 1, 1), (LENGTH - 5, 3)):
            part = run(start, count, 1)
            np.testing.assert_array_equal(part, whole[start : start + count], err_msg=isa)


def test_as_many_as_there_are_is_all(compiled: ctypes.CDLL) -> None:
    k, v = np.random.default_rng(2).standard_normal((2, 3 * BLOCK, 1, 32)).astype(np.float32)
    few = filled("int8", k, v)
    q = np.random.default_rng(3).standard_normal((len(k), 4, 32)).astype(np.float32)
    every = allocate(format="int8", blocks=9, layers=2, kv_heads=1, head_dim=32)
    append(every, TABLE, 1, 0, k, v)
    found, of_all = (native.attend(compiled, x, TABLE, 1, q, 0) for x in (few, every))
    np.testing.assert_array_equal(found, of_all)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 8, "blocks": 1}
    sealed = allocate_sealed(format="k4v4", **sizes)
    with pytest.raises(ValueError, match="k4v4 with 2 recent blocks"):
        allocate(format="k4v4", sealed=sealed, recent=2, **sizes)
    monkeypatch.setattr("edgellm.kernels.attention.library_for", lambda _: None)
    blocks = allocate(format="int8", recent=2, **sizes)
    with pytest.raises(ValueError, match="without C"):
        attend(blocks, [0], 0, np.ones((1, 1, 8), np.float32), 0)
