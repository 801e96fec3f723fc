from __future__ import annotations

import pytest

from edgellm.cache.block_pool import BlockPool
from edgellm.cache.groups import CacheGroup
from edgellm.cache.prefix_index import Match, PrefixIndex, chain
from edgellm.errors import CacheFullError
from edgellm.kernels.kv_blocks import BLOCK

TOKENS = list(range(1000, 1000 + 2 * BLOCK + 50))


EVERYWHERE = [CacheGroup((0, 1), None, 1, 8)]
# The second group sees 100 positions.
WINDOWED = [CacheGroup((0,), None, 1, 8), CacheGroup((1,), 100, 1, 8)]


def insert(index: PrefixIndex, tokens: list[int], position: int, *blocks: int | None) -> None:
    parent = index.root
    for begin in range(0, position * BLOCK, BLOCK):
        parent = chain(parent, tokens[begin : begin + BLOCK])
    index.insert(parent, tokens[position * BLOCK : (position + 1) * BLOCK], blocks)


def filled() -> PrefixIndex:
    index = PrefixIndex(b"model", EVERYWHERE)
    for position, block in enumerate((7, 3, 9)):
        insert(index, TOKENS, position, block)
    return index


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (TOKENS, (306, [7, 3, 9])),
        (TOKENS[:200], (200, [7, 3])),
        (TOKENS[:256], (256, [7, 3])),
        (TOKENS[:5], (5, [7])),
        ([*TOKENS[:130], 5], (130, [7, 3])),
        ([*TOKENS, 1, 2], (306, [7, 3, 9])),
        ([5, *TOKENS], (0, [])),
        (TOKENS[128:], (0, [])),
        ([], (0, [])),
    ],
)
def test_longest_prefix_at_any_token(tokens: list[int], expected: tuple[int, list[int]]) -> None:
    length, blocks = expected
    assert filled().match(tokens) == Match(length, [blocks])


def test_a_salt_has_prefixes_of_its_own() -> None:
    index = filled()
    salted = index.salted_root("a key")
    assert index.salted_root("").name == index.root
    assert len({index.root, salted.name, index.salted_root("another").name}) == 3
    assert index.match(TOKENS, root=salted).length == 0
    index.insert(salted.name, TOKENS[:BLOCK], [5])
    assert index.match(TOKENS, root=salted) == Match(BLOCK, [[5]])
    assert index.match(TOKENS).length == len(TOKENS)
    plain, other = list(index.names(TOKENS)), list(index.names(TOKENS, root=salted))
    assert len(plain) == len(other) == 2
    assert not set(plain) & set(other)


def test_branches_from_one_prefix() -> None:
    index = filled()
    other = [*TOKENS[:140], *range(200)]
    insert(index, other, 1, 5)
    assert index.match(other) == Match(256, [[7, 5]])
    assert index.match(TOKENS[:256]) == Match(256, [[7, 3]])


def test_removed_blocks_are_not_found() -> None:
    index = filled()
    index.remove(0, 3)
    assert index.match(TOKENS) == Match(128, [[7]])
    assert not index.holds(0, 3)
    index.remove(0, 3)


def windowed(lost: tuple[int, ...]) -> PrefixIndex:
    """Three blocks of both groups, without some of the second one's."""
    index = PrefixIndex(b"model", WINDOWED)
    for position in range(3):
        insert(index, TOKENS, position, position, None if position in lost else 10 + position)
    return index


@pytest.mark.parametrize(
    ("lost", "length", "expected"),
    [
        ((), 306, (306, [[0, 1, 2], [None, 11, 12]])),
        ((0,), 306, (306, [[0, 1, 2], [None, 11, 12]])),
        ((0, 1), 306, (0, [[], []])),  # position 306 sees 207 on, in the second block
        ((1,), 306, (128, [[0], [10]])),
        ((2,), 306, (256, [[0, 1], [None, 11]])),
        ((0,), 230, (230, [[0, 1], [None, 11]])),
        ((0,), 226, (0, [[], []])),  # sees 127, the last of the first block
        ((0,), 227, (227, [[0, 1], [None, 11]])),
        ((), 128, (128, [[0], [10]])),
    ],
)
def test_a_window_needs_only_what_it_sees(
    lost: tuple[int, ...], length: int, expected: tuple[int, list[list[int | None]]]
) -> None:
    assert windowed(lost).match(TOKENS[:length]) == Match(*expected)


def test_windows_alone_need_no_beginning() -> None:
    index = PrefixIndex(b"model", [CacheGroup((0,), 100, 1, 8)])
    insert(index, TOKENS, 1, 4)
    insert(index, TOKENS, 2, 5)
    assert index.match(TOKENS) == Match(306, [[None, 4, 5]])
    assert index.match(TOKENS[:200]) == Match(0, [[]])
    index.remove(0, 4)
    assert index.match(TOKENS) == Match(0, [[]])


def test_pool_reuses_unknown_blocks_first_and_the_oldest_prefix_last() -> None:
    index = PrefixIndex(b"", EVERYWHERE)
    pool = BlockPool(3, index)
    blocks = [pool.allocate() for _ in range(3)]
    insert(index, [1], 0, blocks[0])
    insert(index, [2], 0, blocks[1])
    for block in blocks:
        pool.release(block)
    assert pool.used == 0
    assert pool.allocate() == blocks[2]
    pool.retain(blocks[0])
    assert pool.allocate() == blocks[1]
    assert index.match([2]) == Match(0, [[]])
    assert index.match([1]) == Match(1, [[blocks[0]]])
    with pytest.raises(CacheFullError, match="all 3 blocks"):
        pool.allocate()


def test_why_a_prefix_goes_no_further() -> None:
    index = filled()
    inner = chain(index.root, TOKENS[:BLOCK])
    assert index.end_of(index.root, TOKENS[:90], 90) == "whole"
    assert index.end_of(index.root, [*TOKENS[:90], 5, 6], 90) == "differs"
    assert index.end_of(inner, [5, 6], 0) == "differs"
    assert index.end_of(inner, TOKENS[BLOCK : 2 * BLOCK], 0) == "reused"  # in another group
    last = chain(inner, TOKENS[BLOCK : 2 * BLOCK])
    assert index.end_of(last, [*TOKENS[2 * BLOCK :], 5], 50) == "new"
    assert index.end_of(chain(inner, [5] * BLOCK), [7, 8], 0) == "new"
    index.remove(0, 3)
    assert index.end_of(inner, TOKENS[BLOCK:], 0) == "reused"
    assert index.end_of(inner, [5] * BLOCK, 0) == "new"


def test_names_of_reused_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.cache.prefix_index._REMEMBERED", 2)
    index = filled()
    prompts = [[first] * BLOCK for first in range(3)]
    for block, prompt in enumerate(prompts, 20):
        index.insert(index.root, prompt, [block])
        index.remove(0, block)
    assert [index.end_of(index.root, p, 0) for p in prompts] == ["differs", "reused", "reused"]
