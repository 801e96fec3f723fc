"""A sequence that grows beside the thread that uses the cache."""

from __future__ import annotations

import pytest
from rows_of_tokens import SEALED, check, extend, make, new

from edgellm.cache.growth import Growth
from edgellm.cache.kv_cache import KVCache
from edgellm.errors import CacheFullError, ContextOverflowError

TOKENS = list(range(1000))
WINDOWS = [(None, None), (256, None), (130, None), SEALED]


def used(cache: KVCache) -> list[int]:
    return [group.pool.used for group in cache.groups]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("start", [0, 128, 300, 640])
def test_it_lands_as_if_it_had_grown_by_itself(windows: tuple[int | None, ...], start: int) -> None:
    cache = make(windows)
    base = new(cache, TOKENS[:start])
    growth = Growth(base, 150)
    base.close()
    held = used(cache)
    other = new(cache, [7] * 500)  # takes blocks that are free
    extend(cache, growth, TOKENS[start : start + 100])
    extend(cache, growth, TOKENS[start + 100 : start + 140])
    assert cache.cached_prefix(TOKENS) <= start  # others do not find what is on its way
    other.close()
    assert used(cache) == held
    landed = growth.land()
    assert len(landed) == start + 140
    check(cache, landed)
    assert cache.cached_prefix(TOKENS) >= (start + 140) // 128 * 128
    extend(cache, landed, TOKENS[start + 140 : start + 200])
    check(cache, landed)
    landed.close()
    assert used(cache) == [0] * len(used(cache))


@pytest.mark.parametrize("how", ["closed", "dropped", "landed and dropped"])
def test_one_that_is_not_wanted_gives_its_room_back(how: str) -> None:
    cache = make((None, None))
    base = new(cache, TOKENS[:100])
    growth = Growth(base, 400)
    extend(cache, growth, TOKENS[100:300])
    if how == "closed":
        growth.close()
    elif how == "landed and dropped":
        growth.land()
    del growth
    base.close()
    assert used(cache) == [0]


@pytest.mark.parametrize("count", [700, 1150])
def test_one_without_room_leaves_nothing(count: int) -> None:
    cache = make((None, None), blocks=6)
    base = new(cache, TOKENS[:100])
    held = used(cache)
    expected = CacheFullError if count == 700 else ContextOverflowError
    with pytest.raises(expected) as raised:
        Growth(base, count)
    if expected is CacheFullError:
        assert used(cache) == held  # at once, though the exception is still there
    del raised
    assert used(cache) == held
