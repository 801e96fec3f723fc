"""Snapshots of states: where they are taken, and which are given up first."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from states_of_tokens import SPARSE, VALUE, begun, check, extend, make, tokens_of

from edgellm.cache.disk_cache import DiskCache
from edgellm.cache.groups import CacheGroup, StateGroup
from edgellm.cache.kv_cache import KVCache
from edgellm.kernels.kv_blocks import BLOCK


def test_snapshots_take_the_memory_of_few_sequences() -> None:
    cache = make((StateGroup((0,), elements=3),), ctx_size=12800, blocks=101)
    sequence = begun(cache, tokens_of(0, 12700))
    assert cache.groups[0].pool.touched < 10
    assert cache.groups[0].pool.used == len(sequence.tables[0].held) <= 5


@pytest.mark.parametrize(("elements", "kept"), [(3, 20), (100_000, 4)])
def test_small_states_of_many_short_texts_are_kept(elements: int, kept: int) -> None:
    """As many as of K and V, where they take a quarter of the bytes at the most."""
    groups = (CacheGroup((0,), None, 1, VALUE), StateGroup((1,), elements=elements))
    cache = make(groups, ctx_size=12800, blocks=101)
    texts = [tokens_of(seed, 140) for seed in range(20)]
    for text in texts:
        begun(cache, text).close()
    found = [cache.cached_prefix(text) == len(text) for text in texts]
    assert sum(found) == kept
    assert all(found[-kept:])
    counts = [group.pool.touched for group in cache.groups]
    sizes = [each.blocks.nbytes // each.blocks.count for each in cache.groups]
    assert counts[1] * sizes[1] <= max(9 * sizes[1], 101 * sizes[0] / 4)


@pytest.mark.parametrize("interval", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 128, 129, 500])
def test_blocks_of_a_step(rows: int, interval: int) -> None:
    group, most = StateGroup((0,), elements=1, interval=interval), 0
    for start in {1, 2, 127, *range(63, 4 * BLOCK, 64), 4 * BLOCK - 1, 4 * BLOCK}:
        sequence = make((group,), ctx_size=1100).sequence()
        sequence.expect(start + rows)
        with sequence.reserved(start):
            sequence.commit([0] * start)
        with sequence.reserved(rows):
            most = max(most, sequence.tables[0].store.pool.used)
    assert most == group.blocks_for(1100, rows=rows)


@pytest.mark.parametrize("rows", [512, 100, 1])
def test_large_states_are_kept_at_few_places(rows: int) -> None:
    """At regular ones, at the end of a prompt's last full block, and at the end of all."""
    cache, tokens = make(SPARSE, ctx_size=2000), tokens_of(0, 1200)
    sequence = cache.sequence()
    sequence.expect(700)
    for begin, end in ((0, 700), (700, 1200)):
        extend(cache, sequence, tokens[begin:end], rows=rows)
        check(cache, sequence)
    sequence.close()
    assert cache.used_blocks == 0
    found = {cache.cached_prefix(tokens[:length]) for length in range(1, 1201)}
    assert found == {0, 512, 640, 1024, 1200}
    for length in (511, 512, 639, 640, 1100, 1199, 1200):
        again = cache.sequence(tokens[:length])
        check(cache, again)
        again.close()


def test_a_prompt_writes_few_large_states() -> None:
    cache, tokens = make(SPARSE, ctx_size=2100), tokens_of(0, 2000)
    sequence, written = cache.sequence(), 0
    sequence.expect(2000)
    for begin in range(0, 2000, 500):
        with sequence.reserved(500):
            view = sequence.states(begin, begin + 500)[0]
            assert view is not None
            written += len(view.targets)
            sequence.commit(tokens[begin : begin + 500])
    assert written == 4 + 3 + 1  # of the steps, at 512, 1,024 and 1,536, and at 1,920


def test_a_sequence_that_ends_with_a_block_is_found_there() -> None:
    cache, tokens = make(SPARSE), tokens_of(0, 256)
    begun(cache, tokens).close()
    assert cache.cached_prefix(tokens) == 256
    assert cache.cached_prefix(tokens[:255]) == 0


def test_a_rewind_finds_what_a_sequence_alone_has_at_few_places() -> None:
    cache = make(SPARSE, ctx_size=2000)
    sequence = cache.sequence()
    sequence.shareable = 0
    extend(cache, sequence, tokens_of(0, 700), rows=700)
    sequence.truncate(699)
    assert len(sequence) == 512
    check(cache, sequence)


def turns(cache: KVCache, count: int, *, prompt: int, answer: int) -> list[int]:
    """A chat of one sequence whose answers come token by token; the tokens computed in each turn.

    Each turn's prompt is all tokens so far and some more.
    """
    computed, tokens = [], tokens_of(0, 0)
    for turn in range(count):
        tokens = tokens + tokens_of(turn, prompt)
        sequence = cache.sequence(tokens[:-1])
        sequence.expect(len(tokens))
        computed.append(len(tokens) - len(sequence))
        extend(cache, sequence, tokens[len(sequence) :])
        for token in tokens_of(100 + turn, answer):
            extend(cache, sequence, [token])
            tokens = [*tokens, token]
        check(cache, sequence)
        sequence.close()
    return computed


def large_states(ctx_size: int) -> KVCache:
    """States that take more than all K and V: the pool has room for one sequence's alone."""
    groups = (StateGroup((0,), elements=20_000, interval=4), CacheGroup((1,), None, 1, VALUE))
    return make(groups, ctx_size=ctx_size, blocks=ctx_size // BLOCK + 1)


@pytest.mark.slow
def test_a_chat_of_ten_turns_computes_its_new_tokens_alone() -> None:
    cache = large_states(4096)
    assert turns(cache, 10, prompt=230, answer=100) == [230] * 10
    assert cache.groups[0].pool.touched <= 7


def test_the_snapshots_that_stay_lie_far_apart() -> None:
    """A prompt has more snapshots than the pool; the oldest one of a text is not the first to go.

    Wherever another prompt leaves the text, it finds a place not far before."""
    cache, tokens = large_states(12800), tokens_of(0, 12000)
    sequence = cache.sequence()
    sequence.expect(len(tokens))
    extend(cache, sequence, tokens)
    sequence.close()
    pool = cache.groups[0].pool
    found = sorted({cache.cached_prefix(tokens[:length]) for length in range(0, 12001, 16)})
    assert found[0] == 0
    assert found[-3:-1] == [11776, 11904]
    assert pool.touched <= 7
    assert len(found) >= 6
    assert max(b - a for a, b in pairwise(found)) <= 4096


def test_a_text_that_was_not_used_for_long_goes_before_all_of_another() -> None:
    cache = large_states(4096)
    first, second = tokens_of(0, 1500), tokens_of(1, 1500)
    for tokens in (first, second, second[:1100], second):
        sequence = cache.sequence(tokens[:-1])
        sequence.expect(len(tokens))
        extend(cache, sequence, tokens[len(sequence) :])
        sequence.close()
    assert [cache.cached_prefix(second[:n]) for n in (600, 1100, 1450, 1500)] == [
        512,
        1100,
        1408,
        1500,
    ]


def test_large_states_outlive_the_process(tmp_path: Path) -> None:
    first, second = make(SPARSE, ctx_size=2000), make(SPARSE, ctx_size=2000)
    first.disk = second.disk = DiskCache(tmp_path, budget=1 << 30)
    tokens = tokens_of(0, 1200)
    sequence = first.sequence()
    sequence.expect(700)
    for begin, end in ((0, 700), (700, 1200)):
        extend(first, sequence, tokens[begin:end])
    first.keep(sequence)
    for length, places in ((1200, 1024), (1000, 640), (639, 0)):
        found = second.sequence(tokens[:length])
        assert len(found) == places
        check(second, found)
        found.close()


def test_a_prompt_that_leaves_another_between_two_places_differs_from_it() -> None:
    """No memory was needed for others: what is before has never been kept."""
    cache = make(SPARSE, ctx_size=2000, blocks=16)
    begun(cache, tokens_of(0, 1100)).close()
    tokens = [*tokens_of(0, 900), *tokens_of(1, 60)]
    sequence = cache.sequence(tokens)
    assert len(sequence) == 512
    assert sequence.end_in(tokens) == "differs"
    sequence.close()
    begun(cache, tokens_of(2, 1900)).close()
    assert cache.sequence(tokens).end_in(tokens) == "reused"
