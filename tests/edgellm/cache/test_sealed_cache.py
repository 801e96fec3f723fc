"""Hot and sealed blocks of sequences that grow, are cut, forked, forgotten and found again."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_of_tokens import CTX, MIXED, SEALED, check, extend, make, new

from edgellm.cache.groups import CacheGroup, stored_groups
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.errors import CacheFullError, OptionError
from edgellm.kernels.kv_blocks import BLOCK

TOKENS = list(range(CTX))


def used(cache: KVCache) -> list[int]:
    return [group.pool.used for group in cache.groups]


@pytest.mark.parametrize(
    ("length", "held"),
    [
        *((1, (1, 0)), (256, (2, 0)), (257, (3, 0)), (384, (3, 0))),
        *((385, (4, 1)), (386, (3, 1)), (1024, (3, 5)), (1025, (4, 6))),
    ],
)
def test_a_sequence_holds_the_first_block_the_last_ones_and_the_sealed_ones_between(
    length: int, held: tuple[int, int]
) -> None:
    """And the block that is sealed next, until the next step has begun."""
    cache = make(SEALED)
    sequence = new(cache, TOKENS[: length - 1])
    extend(cache, sequence, [TOKENS[length - 1]])
    assert used(cache) == list(held)
    check(cache, sequence)


def test_a_prefix_is_found_where_its_last_blocks_are() -> None:
    cache = make(SEALED, blocks=12)
    first = new(cache, TOKENS[:900])
    first.close()
    for length in (900, 700, 257, 100):
        found = cache.sequence(TOKENS[:length])
        assert len(found) == length
        check(cache, found)
        found.close()


def test_a_long_text_leaves_the_ends_of_others() -> None:
    cache = make(SEALED, blocks=12)
    new(cache, TOKENS[:900]).close()
    new(cache, [5000 + token for token in range(1100)]).close()
    again = cache.sequence(TOKENS)
    check(cache, again)
    assert len(again) == 900


def test_a_rewind_past_the_hot_blocks_takes_what_is_still_there() -> None:
    cache = make(SEALED)
    sequence = new(cache, TOKENS[:1000])
    for length in (999, 897, 896, 640, 300, 20):
        sequence.truncate(length)
        assert len(sequence) == length
        check(cache, sequence)
        extend(cache, sequence, TOKENS[length : length + 260])
        check(cache, sequence)
        sequence.truncate(length)
    sequence.close()
    assert used(cache) == [0, 0]


ACTIONS = ["grow", "cut", "fork", "close", "find", "draft"]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "cut", "fork", "close", "find", "draft"]), st.integers(0, 1 << 20)
    ),
    max_size=25,
)


@pytest.mark.parametrize("windows", [SEALED, MIXED], ids=str)
@settings(deadline=None, max_examples=25)
@given(operations=OPERATIONS, blocks=st.integers(11, 24))
def test_any_history_keeps_every_sequence_whole(
    windows: tuple[int | str, ...], operations: list[tuple[str, int]], blocks: int
) -> None:
    cache = make(windows, blocks=blocks)
    sequences: list[Sequence] = [cache.sequence()]
    for name, number in operations:
        sequence = sequences[number % len(sequences)]
        with contextlib.suppress(CacheFullError):
            change(cache, sequences, sequence, name, number)
        for each in sequences:
            check(cache, each)
    for each in sequences:
        each.close()
    assert not any(used(cache))


def change(
    cache: KVCache, sequences: list[Sequence], sequence: Sequence, name: str, number: int
) -> None:
    length, story = len(sequence), number % 3
    tokens = [100 * story + token for token in TOKENS]
    if name == "grow":
        more = min(CTX - length, 1 + number % 500)
        extend(cache, sequence, tokens[length : length + more])
    elif name == "cut":
        sequence.truncate(max(0, length - number % 400))
    elif name == "fork":
        sequences.append(sequence.fork())
    elif name == "close":
        sequence.close()
    elif name == "find":
        sequence.close()
        sequences[sequences.index(sequence)] = cache.sequence(tokens[: number % CTX])
    elif length + 8 <= CTX:  # rows of a draft, of which some are right
        with sequence.reserved(8, drafted=7):
            right = sequence.tables[0].ids[length // BLOCK :]
            assert right
        extend(cache, sequence, tokens[length : length + number % 8])


def test_what_has_no_sealed_blocks_is_refused() -> None:
    with pytest.raises(OptionError, match="multiples of 8"):
        stored_groups([CacheGroup((0,), None, kv_heads=1, head_dim=12)], "k4v4")
    with pytest.raises(OptionError, match="sliding windows"):
        stored_groups([CacheGroup((0,), 40, kv_heads=1, head_dim=8)], "k8v4")


def test_layers_with_windows_or_latents_have_int8_beside_others() -> None:
    groups = [
        CacheGroup((0,), 40, kv_heads=1, head_dim=12),
        CacheGroup((1,), None, kv_heads=1, head_dim=8),
        CacheGroup((2,), None, kv_heads=1, head_dim=8, latent=32),
    ]
    stored = [
        (each.layers, each.part, each.format)
        for each in stored_groups(groups, "k4v2")
        if isinstance(each, CacheGroup)
    ]
    assert stored == [
        ((0,), "all", "int8"),
        ((1,), "hot", "k4v2"),
        ((2,), "all", "int8"),
        ((1,), "sealed", "k4v2"),
    ]
