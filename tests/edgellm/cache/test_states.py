"""Layers with a state of fixed size: prefixes, rewinds, forks, drafts, saved sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states_of_tokens import GROUPS, SPARSE, VALUE, begun, check, compute, extend, make, tokens_of

from edgellm import CacheFullError
from edgellm.cache.disk_cache import DiskCache
from edgellm.cache.groups import CacheGroup, Group
from edgellm.cache.growth import Growth
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence


@pytest.fixture(params=GROUPS)
def cache(request: pytest.FixtureRequest) -> KVCache:
    return make(GROUPS[request.param])


@pytest.mark.parametrize("rows", [512, 100, 1])
def test_a_prefix_is_found_at_the_ends_of_full_blocks_and_at_its_own(
    cache: KVCache, rows: int
) -> None:
    tokens = tokens_of(0, 300)
    begun(cache, tokens, rows=rows).close()
    for length, found in ((127, 0), (128, 128), (255, 128), (299, 256), (300, 300)):
        sequence = cache.sequence(tokens[:length])
        assert len(sequence) == found == cache.cached_prefix(tokens[:length])
        check(cache, sequence)
        sequence.close()


def test_a_shorter_end_is_found_beside_a_longer_one(cache: KVCache) -> None:
    tokens = tokens_of(0, 300)
    for length in (300, 200, 250):
        begun(cache, tokens[:length]).close()
    for length in (200, 250, 300):
        assert cache.cached_prefix(tokens[:length]) == length


def test_a_rewind_goes_back_to_the_end_of_a_full_block(cache: KVCache) -> None:
    sequence = begun(cache, tokens_of(0, 300))
    for wanted, found in ((300, 300), (290, 256), (256, 256), (200, 128), (100, 0)):
        sequence.truncate(wanted)
        assert len(sequence) == found
        check(cache, sequence)
        extend(cache, sequence, tokens_of(0, 300)[found:wanted])
        check(cache, sequence)


def test_no_rewind_to_states_whose_memory_was_reused() -> None:
    cache = make(GROUPS["states"], blocks=5)
    sequence = begun(cache, tokens_of(0, 300), rows=100)
    others = [begun(cache, tokens_of(seed, 100)) for seed in (1, 2, 3)]
    sequence.truncate(256)
    assert len(sequence) == 0
    for each in (sequence, *others):
        check(cache, each)


def test_forks_go_on_apart(cache: KVCache) -> None:
    sequence = begun(cache, tokens_of(0, 200))
    others = [sequence.fork() for _ in range(3)]
    sequence.close()
    for seed, other in enumerate(others):
        extend(cache, other, tokens_of(seed, 70))
    for seed, other in enumerate(others):
        assert other.tokens == tokens_of(0, 200) + tokens_of(seed, 70)
        check(cache, other)


@pytest.mark.parametrize("length", [0, 100, 128, 200])
def test_a_step_whose_rows_become_no_tokens_changes_no_state(cache: KVCache, length: int) -> None:
    sequence = begun(cache, tokens_of(0, length))
    with sequence.reserved(250):
        compute(cache, sequence, tokens_of(1, 250))
    assert len(sequence) == length
    check(cache, sequence)
    used = [group.pool.used for group in cache.groups]
    extend(cache, sequence, tokens_of(2, 10))
    check(cache, sequence)
    sequence.truncate(0)
    assert [group.pool.used for group in cache.groups] == [0 for _ in used]


def test_a_step_without_room_changes_no_state() -> None:
    cache = make(GROUPS["states"], blocks=4)
    sequence = begun(cache, tokens_of(0, 200))
    held = sequence.fork()
    with pytest.raises(CacheFullError), sequence.reserved(400):
        pass
    for each in (sequence, held):
        check(cache, each)


def test_steps_of_one_reservation_each_have_a_block(cache: KVCache) -> None:
    """Chunks of a prompt run one behind the other, and become tokens in the end."""
    tokens = tokens_of(0, 330)
    sequence = begun(cache, tokens[:30])
    with sequence.reserved(300, windowed=False):
        for end in (60, 128, 300, 330):
            sequence.open(end)
            start = len(sequence)
            compute(cache, sequence, tokens[start:end])
            sequence.commit(tokens[start:end])
    check(cache, sequence)
    sequence.truncate(256)
    assert len(sequence) == 256
    check(cache, sequence)


@pytest.mark.parametrize("start", [0, 100, 128, 200])
@pytest.mark.parametrize("landed", [True, False])
def test_a_growth_that_ends_early_leaves_no_wrong_states(
    cache: KVCache, start: int, landed: bool
) -> None:
    tokens = tokens_of(0, 500)
    base = begun(cache, tokens[:start])
    for ends in ([], [start + 60], [start + 60, start + 170], [start + 300]):
        growth = Growth(base, 300)
        for end in ends:
            compute(cache, growth, tokens[len(growth) : end], in_place=True)
            growth.commit(tokens[len(growth) : end])
        if len(growth) < start + 300:  # a step that is not taken
            compute(cache, growth, tokens[len(growth) : start + 300], in_place=True)
        if landed:
            other = growth.land()
            assert other.tokens == tokens[: len(other)]
            check(cache, other)
            other.close()
        else:
            growth.close()
        for length in (*range(1, 501, 33), start, start + 300):
            found = cache.sequence(tokens[:length])
            check(cache, found)
            found.close()
    base.close()
    assert cache.used_blocks == 0
    assert cache.cached_prefix(tokens) == start + 300


def draft(cache: KVCache, sequence: Sequence, token: int, guess: list[int]) -> None:
    """A step with a token and a draft behind it, which is not settled."""
    with sequence.reserved(1 + len(guess), drafted=len(guess)):
        compute(cache, sequence, [token, *guess])
        sequence.commit([token, *guess])


@pytest.mark.parametrize("start", [0, 122, 127])
@pytest.mark.parametrize("right", [0, 1, 4, 7])
def test_any_part_of_a_draft_is_dropped_and_no_more(cache: KVCache, start: int, right: int) -> None:
    tokens = tokens_of(0, 400)
    sequence = begun(cache, tokens[:start])
    for seed in range(20):
        end = len(sequence) + 1 + right
        wrong = tokens_of(seed + 1, 7 - right)
        draft(cache, sequence, tokens[len(sequence)], [*tokens[len(sequence) + 1 : end], *wrong])
        sequence.truncate(end)
        assert sequence.tokens == tokens[:end]
        sequence.settle()
        check(cache, sequence)
        for table in sequence.tables:  # no more than a plain sequence
            assert len(set(table.held)) == table.store.pool.used == len(table.held)
    fork = sequence.fork()
    sequence.close()
    check(cache, fork)
    fork.close()
    assert cache.used_blocks == 0
    assert cache.cached_prefix(tokens) == end


def test_a_draft_that_is_not_settled(cache: KVCache) -> None:
    """It may be dropped later, in part, or go with its sequence; the next step settles it."""
    tokens = tokens_of(0, 400)
    for kept in (0, 3, 5, 7, 9):
        sequence = begun(cache, tokens[:124])
        draft(cache, sequence, tokens[124], tokens[125:132])
        fork = sequence.fork()
        if kept == 9:
            extend(cache, sequence, tokens[132:140])
        else:
            sequence.truncate(125 + kept)
            assert len(sequence) == 125 + kept
        check(cache, sequence)
        check(cache, fork)
        sequence.close()
        fork.close()
        assert cache.used_blocks == 0


def test_tokens_that_are_computed_one_by_one_and_dropped_together(cache: KVCache) -> None:
    """As a draft model guesses them."""
    tokens = tokens_of(0, 400)
    sequence = begun(cache, tokens[:120])
    for right in (0, 2, 5, 1, 4, 3, 5):
        begin = len(sequence)
        for count in range(5):
            one = tokens[begin + count] if count < right else 301 + count
            with sequence.reserved(1, drafted=count + 1):
                compute(cache, sequence, [one])
                sequence.commit([one])
        sequence.truncate(begin + right)
        assert sequence.tokens == tokens[: begin + right]
        check(cache, sequence)


def test_a_draft_without_room_changes_no_state() -> None:
    cache = make(GROUPS["states"], blocks=8)
    sequence = begun(cache, tokens_of(0, 200))
    held = sequence.fork()
    with pytest.raises(CacheFullError), sequence.reserved(8, drafted=7):
        pass
    assert cache.used_blocks == 1
    for each in (sequence, held):
        check(cache, each)
        extend(cache, each, tokens_of(1, 30))
        check(cache, each)


@pytest.mark.parametrize(("held", "room"), [(0, [7, 3, 2, 1]), (11, [7, 3, 2, 1]), (22, [1, 0, 0])])
def test_draft_rows_that_there_is_room_for(held: int, room: list[int]) -> None:
    """Blocks of sequences are not taken for them."""
    groups = GROUPS["and layers that attend"]
    cache = KVCache(groups, format="f32", ctx_size=1000, blocks=24 - 7, fingerprint=b"x", drafts=7)
    assert cache.groups[1].pool.available == cache.groups[0].pool.available + 7
    for _ in range(held):
        cache.groups[1].pool.allocate()
    assert [cache.draft_room(count + 1) for count in range(len(room))] == room
    alone = (CacheGroup((0,), None, 1, VALUE),)
    only_kv = KVCache(alone, format="f32", ctx_size=1000, blocks=24, fingerprint=b"x")
    assert only_kv.draft_room(1) is None


def test_a_rewind_finds_what_the_sequence_alone_has(cache: KVCache) -> None:
    """No other sequence may begin with its tokens, so the prefix index has none of them."""
    sequence = cache.sequence()
    sequence.shareable = 0
    extend(cache, sequence, tokens_of(0, 300))
    sequence.truncate(299)
    assert len(sequence) == 256
    check(cache, sequence)


@settings(max_examples=15)  # each full cache collects garbage, 0.4 s in a large process
@given(start=st.integers(0, 300), end=st.integers(1, 690))
def test_blocks_that_a_sequence_lacks(start: int, end: int) -> None:
    """As many are enough, and one fewer is not where one step computes all."""
    cache = make(GROUPS["states"], blocks=24)
    sequence = begun(cache, tokens_of(0, start))
    (needed,) = cache.needed(sequence, start + end)
    pool = sequence.tables[0].store.pool
    taken = [pool.allocate() for _ in range(pool.available - needed)]
    if end + 1 <= cache.rows_at_once:
        taken.append(pool.allocate())
        with pytest.raises(CacheFullError), sequence.reserved(end + 1):
            pass
        pool.release(taken.pop())
    extend(cache, sequence, tokens_of(1, end + 1))


def packed_and_back(cache: KVCache, sequence: Sequence) -> Sequence:
    packed = cache.pack(sequence)
    assert cache.can_begin(packed)
    other = cache.sequence()
    assert cache.unpack(other, packed)
    return other


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 300])
def test_saved_and_read_again(cache: KVCache, length: int) -> None:
    sequence = begun(cache, tokens_of(0, length))
    other = packed_and_back(cache, sequence)
    assert other.tokens == sequence.tokens
    check(cache, other)
    extend(cache, other, tokens_of(1, 10))
    check(cache, other)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_full_blocks_outlive_the_process(groups: tuple[Group, ...], tmp_path: Path) -> None:
    first, second = make(groups), make(groups)
    first.disk = second.disk = DiskCache(tmp_path, budget=1 << 30)
    tokens = tokens_of(0, 600)
    sequence = begun(first, tokens[:300])
    first.keep(sequence)
    extend(first, sequence, tokens[300:])
    first.keep(sequence)
    found = second.sequence(tokens)
    assert len(found) == 512
    check(second, found)


def test_a_context_that_shifts_computes_the_rest_again(cache: KVCache) -> None:
    sequence = begun(cache, tokens_of(0, 400))
    sequence.shift(keep=140, discard=100)
    assert sequence.tokens == tokens_of(0, 128)
    check(cache, sequence)


OPERATIONS = ("begin", "extend", "truncate", "fork", "close", "pack", "strike", "keep", "draft")


@settings(deadline=None)
@given(
    groups=st.sampled_from([*GROUPS, "sparse"]),
    operations=st.lists(
        st.tuples(
            st.sampled_from(OPERATIONS), st.integers(0, 3), st.integers(0, 2), st.integers(0, 300)
        ),
        max_size=20,
    ),
    disk=st.booleans(),
)
def test_any_course_of_events(
    tmp_path_factory: pytest.TempPathFactory,
    groups: str,
    operations: list[tuple[str, int, int, int]],
    disk: bool,
) -> None:
    cache = make({**GROUPS, "sparse": SPARSE}[groups], blocks=40)
    if disk:
        cache.disk = DiskCache(tmp_path_factory.mktemp("kv"), budget=1 << 30)
    sequences = [cache.sequence() for _ in range(4)]
    for operation, which, seed, size in operations:
        sequence = sequences[which]
        more = tokens_of(seed, size)[: 1000 - len(sequence) - 1]
        if operation == "begin":
            sequence.close()
            sequences[which] = begun(cache, tokens_of(seed, size))
        elif operation == "extend":
            extend(cache, sequence, more, rows=90 + seed)
        elif operation == "truncate":
            length = min(size, len(sequence))
            sequence.truncate(length)
            assert len(sequence) <= length
        elif operation == "fork":
            sequences[(which + 1) % 4].close()
            sequences[(which + 1) % 4] = sequence.fork()
        elif operation == "pack":
            other = packed_and_back(cache, sequence)
            sequence.close()
            sequences[which] = other
        elif operation == "strike":
            with sequence.reserved(len(more)):
                compute(cache, sequence, more) if more else None
        elif operation == "keep":
            cache.keep(sequence)
        elif operation == "draft" and more:
            draft(cache, sequence, more[0], more[1 : 2 + seed])
            sequence.truncate(len(sequence) - min(size % 4, len(more[1 : 2 + seed])))
            if size % 2:
                sequence.settle()
        else:
            sequence.close()
        for each in sequences:
            check(cache, each)
    for each in sequences:
        each.close()
    assert cache.used_blocks == 0


def test_a_prompt_that_leaves_another_in_a_block_differs_from_it(cache: KVCache) -> None:
    """With states nothing goes on from the middle of a block, and no block was reused."""
    begun(cache, tokens_of(0, 128)).close()
    other = [*tokens_of(0, 100), *tokens_of(1, 60)]
    sequence = cache.sequence(other)
    assert len(sequence) == 0
    assert cache.index.end_of(sequence.root.name, other, 0) == "differs"
