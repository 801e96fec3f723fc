"""Groups with a window beside others: disk, files, devices and damaged blocks."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from inspection import most_siblings
from rows_of_tokens import BUDGET, MIXED, SEALED, VALUE, check, extend, make, new

from edgellm.cache.kv_cache import group_name
from edgellm.errors import CacheFullError
from edgellm.kernels.attention import portable
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK, allocate


@pytest.fixture(
    params=[(None, None), (256, None), (130, None), (300, 300), SEALED, MIXED, BUDGET], ids=str
)
def windows(request: pytest.FixtureRequest) -> tuple[int | None, ...]:
    chosen: tuple[int | None, ...] = request.param
    return chosen


TOKENS = list(range(1000, 2100))


@pytest.mark.parametrize(
    "damaged", [1, 4, 8, *(pytest.param(i, marks=pytest.mark.slow) for i in (0, 2, 3, 5, 6, 7))]
)
@pytest.mark.parametrize("group", [0, -1])
def test_damaged_blocks_on_disk_leave_what_is_in_memory(
    tmp_path: Path, windows: tuple[int | None, ...], damaged: int, group: int
) -> None:
    first = make(windows, tmp_path)
    first.keep(new(first, TOKENS))
    cache = make(windows, tmp_path, blocks=11)
    begun, other = new(cache, TOKENS[:330]), new(cache, list(range(350)))
    begun.close()
    name = list(cache.index.names(TOKENS))[damaged - 1]
    path = tmp_path / f"{group_name(name, cache.groups[group]).hex()}.kv"
    if path.exists():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = cache.sequence(TOKENS)
    check(cache, found)
    check(cache, other)
    with contextlib.suppress(CacheFullError):
        check(cache, new(cache, [7] * 200))
    for sequence in (found, other):
        check(cache, sequence)


@pytest.mark.parametrize("length", [1100, 1023, 1024, 1025, 1060, 1151])
def test_all_full_blocks_come_back_from_disk(
    tmp_path: Path, windows: tuple[int | None, ...], length: int
) -> None:
    tokens = [*TOKENS, *TOKENS][:length]
    first = make(windows, tmp_path)
    first.keep(new(first, tokens))
    cache = make(windows, tmp_path)
    found = cache.sequence(tokens)
    assert len(found) == length // BLOCK * BLOCK == cache.cached_prefix(tokens)
    check(cache, found)


@pytest.mark.parametrize("back", [1, 2, 5, 100])
@pytest.mark.parametrize("length", [1151, 1100, 385, 90])
def test_who_restores_a_sequence_may_go_back(
    windows: tuple[int | None, ...], length: int, back: int
) -> None:
    tokens = [*TOKENS, *TOKENS][:length]
    first, cache = make(windows), make(windows)
    saved = new(first, tokens)
    packed = first.pack(saved)
    assert len(saved) == length
    check(first, saved)
    assert cache.can_begin(packed)
    restored = cache.sequence()
    assert cache.unpack(restored, packed)
    check(cache, restored)
    if back < length:
        restored.truncate(length - back)
        assert len(restored) == length - back
        check(cache, restored)
        extend(cache, restored, [5, 6, 7])
        check(cache, restored)


def test_devices_get_what_was_restored(windows: tuple[int | None, ...]) -> None:
    torch = pytest.importorskip("torch")
    if windows in (SEALED, MIXED, BUDGET):
        pytest.skip("no device has sealed blocks, or a budget")
    first, cache = make(windows), make(windows)
    tokens = TOKENS[:700]
    packed = first.pack(new(first, tokens))
    cache.use_device("cpu")
    restored = cache.sequence()
    assert cache.unpack(restored, packed)
    restored.use_device()
    for table in restored.tables:
        replica = table.store.replica
        assert replica is not None
        for block in table.held:
            host = torch.from_numpy(table.store.blocks.v[block])
            assert torch.equal(host, replica.device.v[block])


def test_a_short_tail_is_remembered_once() -> None:
    cache = make((100, None))
    long = new(cache, TOKENS[:240])
    long.close()
    again = cache.sequence(TOKENS[:240])
    cache.index.remove(0, again.tables[0].ids[1])
    again.close()
    for _ in range(4):
        tail = new(cache, TOKENS[:200])
        tail.close()
    assert most_siblings(cache.index) <= 2


def test_portable_attention_reads_no_block_before_the_window() -> None:
    rng = np.random.default_rng(0)
    blocks = allocate(format="f32", blocks=4, layers=1, kv_heads=1, head_dim=VALUE)
    rows = rng.standard_normal((400, 1, VALUE)).astype("f4")
    append(blocks, [0, 1, 2, 3], 0, 0, rows, rows)
    q = rng.standard_normal((3, 2, VALUE)).astype("f4")
    expected = portable.attend(blocks, [0, 1, 2, 3], 0, q, 397, window=100)
    for array in blocks.arrays:
        array[:2] = np.nan
    found = portable.attend(blocks, [0, 0, 2, 3], 0, q, 397, window=100)
    np.testing.assert_array_equal(found, expected)
