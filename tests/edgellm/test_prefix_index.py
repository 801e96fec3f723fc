from __future__ import annotations

import pytest

from edgellm.cache.prefix_index import BlockPool, PrefixIndex
from edgellm.errors import CacheFullError
from edgellm.kernels.kv_blocks import BLOCK

TOKENS = list(range(1000, 1000 + 2 * BLOCK + 50))


def filled() -> PrefixIndex:
    index = PrefixIndex(b"model")
    for position, block in enumerate((7, 3, 9)):
        index.insert(TOKENS, position, block)
    return index


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (TOKENS, [(7, 128), (3, 128), (9, 50)]),
        (TOKENS[:200], [(7, 128), (3, 72)]),
        (TOKENS[:5], [(7, 5)]),
        ([*TOKENS[:130], 5], [(7, 128), (3, 2)]),
        ([*TOKENS, 1, 2], [(7, 128), (3, 128), (9, 50)]),
        ([5, *TOKENS], []),
        (TOKENS[128:], []),
        ([], []),
    ],
)
def test_longest_prefix_at_any_token(tokens: list[int], expected: list[tuple[int, int]]) -> None:
    assert filled().match(tokens) == expected


def test_branches_from_one_prefix() -> None:
    index = filled()
    other = [*TOKENS[:140], *range(200)]
    index.insert(other, 1, 5)
    assert index.match(other) == [(7, 128), (5, 128)]
    assert index.match(TOKENS[:256]) == [(7, 128), (3, 128)]


def test_removed_blocks_are_not_found() -> None:
    index = filled()
    index.remove(3)
    assert index.match(TOKENS) == [(7, 128)]
    assert not index.holds(3)
    index.remove(3)


def test_pool_reuses_unknown_blocks_first_and_the_oldest_prefix_last() -> None:
    index = PrefixIndex(b"")
    pool = BlockPool(3, index)
    blocks = [pool.allocate() for _ in range(3)]
    index.insert([1], 0, blocks[0])
    index.insert([2], 0, blocks[1])
    for block in blocks:
        pool.release(block)
    assert pool.used == 0
    assert pool.allocate() == blocks[2]
    pool.retain(blocks[0])
    assert pool.allocate() == blocks[1]
    assert index.match([2]) == []
    assert index.match([1]) == [(blocks[0], 1)]
    with pytest.raises(CacheFullError, match="all 3 blocks"):
        pool.allocate()
