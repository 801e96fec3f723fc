"""Sharing, copying, forgetting: K and V hold each token's position and owner, so a mix-up shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm import (
    CacheFullError,
    ContextOverflowError,
    OptionError,
)
from edgellm.cache.block_pool import BlockPool
from edgellm.cache.groups import cache_groups, rope_frequencies
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK


def layer(rope: int, window: int | None = None) -> LayerConfig:
    return LayerConfig(
        mixer=Attention(heads=2, kv_heads=1, head_dim=16, rope=rope, window=window),
        mlp=Mlp(intermediate=32),
    )


CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=320,
    hidden_size=32,
    layers=(layer(0), layer(1)),
    ropes=(Rope(inv_freq=(1.0, 0.1), magnitude=1.3), Rope(inv_freq=(0.5, 0.0))),
    norm_eps=1e-5,
    context_length=1024,
    tied_embedding=True,
)


CONFIGS = {
    "all positions": CONFIG,
    "one window": replace(CONFIG, layers=(layer(0, 40), layer(1, 40))),
    "mixed": replace(CONFIG, layers=(layer(0, 130), layer(1), layer(0, 130))),
    "two windows": replace(CONFIG, layers=(layer(1, 1), layer(0, 300))),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


def make(ctx_size: int = 600, blocks: int = 12, config: ModelConfig = CONFIG) -> KVCache:
    return KVCache(
        cache_groups(config),
        format="f32",
        ctx_size=ctx_size,
        blocks=blocks,
        fingerprint=b"x",
        rope_frequencies=rope_frequencies(config),
    )


def of(sequence: Sequence) -> KVCache:
    cache = sequence._cache
    assert isinstance(cache, KVCache)
    return cache


def extend(sequence: Sequence, tokens: list[int], *, rows: int = 1) -> None:
    """Append tokens, so many at once, whose K and V are functions of the tokens so far."""
    every = [*sequence.tokens, *tokens]
    for first in range(len(sequence), len(every), rows):
        end = min(first + rows, len(every))
        sequence.reserve(end - first)
        values = np.array([key(every[: i + 1]) for i in range(first, end)], np.float32)
        shape = end - first, CONFIG.kv_heads, CONFIG.head_dim
        kv = np.broadcast_to(values[:, None, None], shape)
        for index in range(len(of(sequence).places)):
            view, slot = sequence.view(index)
            append(view.blocks, view.table, slot, first, kv, kv)
        sequence.commit(every[first:end])


def key(tokens: list[int]) -> float:
    return float(hash(tuple(tokens)) % 100_003)


def check(sequence: Sequence) -> None:
    """Every row that the next token sees is what this sequence's own tokens make it."""
    for index, (group, _) in enumerate(of(sequence).places):
        view, slot = sequence.view(index)
        window = of(sequence).groups[group].group.window
        seen = len(sequence) if window is None else min(len(sequence), window - 1)
        for position in range(len(sequence) - seen, len(sequence)):
            block, row = view.table[position // BLOCK], position % BLOCK
            expected = key(sequence.tokens[: position + 1])
            assert sequence.tables[group].at(position // BLOCK) == block
            assert (view.blocks.key_rows(block, slot, row) == expected).all(), position
            assert (view.blocks.value_rows(block, slot, row) == expected).all(), position


def test_prefix_is_shared_and_the_tail_is_copied() -> None:
    cache = make()
    first = cache.sequence()
    extend(first, list(range(200)))
    second = cache.sequence([*range(150), 7, 8])
    assert len(second) == 128  # the tail block of an open sequence is not indexed yet
    first.close()
    third = cache.sequence([*range(150), 7, 8])
    assert len(third) == 150
    extend(third, [7, 8])
    fourth = cache.sequence(list(range(200)))
    assert len(fourth) == 200
    for sequence in (second, third, fourth):
        check(sequence)


@pytest.mark.parametrize("at", [0, 1, 127, 128, 129, 255, 256])
def test_fork_and_rewind_at_any_token(at: int, config: ModelConfig) -> None:
    cache = make(config=config)
    trunk = cache.sequence()
    extend(trunk, list(range(300)))
    branch = trunk.fork()
    branch.truncate(at)
    assert len(branch) <= at
    extend(branch, [9000 + i for i in range(40)])
    check(trunk)
    check(branch)
    branch.close()
    trunk.close()
    assert cache.used_blocks == 0


def test_eight_branches_hold_one_prefix_and_eight_tails() -> None:
    cache = make(ctx_size=1000, blocks=30)
    trunk = cache.sequence()
    extend(trunk, list(range(700)))
    branches = [trunk.fork() for _ in range(8)]
    for i, branch in enumerate(branches):
        extend(branch, [5000 + i])
        check(branch)
    assert cache.used_blocks == 6 + 8


def test_context_is_bounded() -> None:
    sequence = make(ctx_size=10).sequence()
    extend(sequence, list(range(10)))
    with pytest.raises(ContextOverflowError, match=r"11 tokens.*context of 10"):
        sequence.reserve(1)
    check(sequence)


def test_rewind_forward_is_refused() -> None:
    sequence = make().sequence()
    with pytest.raises(OptionError, match="0 to 0"):
        sequence.truncate(1)


def test_unknown_format() -> None:
    with pytest.raises(OptionError, match="int8, f16, f32"):
        KVCache(cache_groups(CONFIG), format="int4", ctx_size=1, blocks=1, fingerprint=b"")  # type: ignore[arg-type]


def test_packed_blocks_take_heads_of_a_multiple_of_8() -> None:
    attention = Attention(heads=8, kv_heads=8, head_dim=20)
    odd = replace(
        CONFIG,
        layers=(replace(CONFIG.layers[0], mixer=attention),),
        ropes=(Rope(inv_freq=(1.0, 0.1, 0.01)),),
    )
    with pytest.raises(OptionError, match="head_dim is 20"):
        KVCache(cache_groups(odd), format="k8v4", ctx_size=1, blocks=1, fingerprint=b"")


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["extend", "fork", "rewind", "close", "open"]),
            st.integers(0, 10),
            st.integers(0, 300),
        ),
        max_size=25,
    )
)
def test_any_history_keeps_every_sequence_whole(
    name: str, steps: list[tuple[str, int, int]]
) -> None:
    cache = make(ctx_size=300, blocks=40, config=CONFIGS[name])
    open_sequences = [cache.sequence()]
    for action, which, number in steps:
        sequence = open_sequences[which % len(open_sequences)]
        if action == "extend":
            # few different tokens, so that histories share prefixes
            extend(sequence, [i % 3 for i in range(min(number, 300 - len(sequence)))])
        elif action == "fork" and len(open_sequences) < 6:
            open_sequences.append(sequence.fork())
        elif action == "rewind":
            sequence.truncate(min(number, len(sequence)))
        elif action == "close":
            sequence.close()
        elif action == "open" and len(open_sequences) < 6:
            open_sequences.append(cache.sequence([i % 3 for i in range(number)]))
    for sequence in open_sequences:
        check(sequence)
        sequence.close()
    assert cache.used_blocks == 0


def filled(cache: KVCache, count: int) -> Sequence:
    sequence = cache.sequence()
    extend(sequence, [(5 * i) % 300 for i in range(count)], rows=20)
    return sequence


@pytest.mark.parametrize(
    ("count", "keep", "discard"),
    [(600, 4, 298), (600, 0, 1), (600, 128, 128), (600, 130, 300), (300, 200, 99), (140, 4, 130)],
)
def test_shift_moves_values_and_turns_keys(
    count: int, keep: int, discard: int, config: ModelConfig
) -> None:
    cache = make(config=config)
    sequence = filled(cache, count)
    before = [key(sequence.tokens[: i + 1]) for i in range(count)]
    tokens = list(sequence.tokens)
    left = count - discard
    sequence.shift(keep=keep, discard=discard)
    if len(sequence) <= keep:  # kept tokens that a window has passed would be seen again
        assert any(layer.attention.window not in (None, 1) for layer in config.layers)
        return check(sequence)
    assert sequence.tokens == tokens[:keep] + tokens[keep + discard :]
    for index, (group, _) in enumerate(cache.places):
        window = config.layers[index].attention.window
        seen = left if window is None else min(left, window - 1)
        angles = -discard * np.array(config.rope_of(index).inv_freq)
        view, slot = sequence.view(index)
        for position in range(left - seen, left):
            block, row = view.table[position // BLOCK], position % BLOCK
            assert sequence.tables[group].at(position // BLOCK) == block
            stays = position < keep
            value = before[position if stays else position + discard]
            turned = np.full(config.head_dim, value)
            if not stays:
                turned[:2] = value * (np.cos(angles) - np.sin(angles))
                turned[2:4] = value * (np.cos(angles) + np.sin(angles))
            assert (view.blocks.value_rows(block, slot, row) == np.float32(value)).all()
            np.testing.assert_allclose(view.blocks.key_rows(block, slot, row)[0], turned, atol=0.02)
    sequence.close()
    assert cache.used_blocks == 0


def test_some_shifts_move_and_some_start_again() -> None:
    config = CONFIGS["mixed"]
    for keep, moves in ((4, True), (250, False)):
        sequence = filled(make(config=config), 600)
        sequence.shift(keep=keep, discard=300)
        assert len(sequence) == 300 if moves else len(sequence) <= keep


def test_keys_that_are_scaled_after_rope_do_not_turn() -> None:
    layers = tuple(
        replace(layer, mixer=replace(layer.attention, qk_norm="head_after_rope"))
        for layer in CONFIG.layers
    )
    cache = make(config=replace(CONFIG, layers=layers))
    sequence = filled(cache, 300)
    sequence.shift(keep=140, discard=100)
    assert len(sequence) == 140  # the rest is to be computed again
    check(sequence)


@pytest.mark.parametrize("window", [1, 2, 128, 129, 130, 300])
def test_blocks_behind_the_window_are_given_back(window: int) -> None:
    config = replace(CONFIG, layers=(layer(0, window), layer(1)))
    cache = make(config=config)
    sequence = cache.sequence()
    for _ in range(25):
        extend(sequence, [len(sequence) % 7] * 24)
        check(sequence)
        windowed, whole = (group.pool.used for group in cache.groups)
        assert windowed <= -(-(window - 1) // BLOCK) + 1
        assert whole == -(-len(sequence) // BLOCK)


def test_memory_of_windows_stays_small_until_many_sequences_need_it() -> None:
    config = replace(CONFIG, layers=(layer(0, 100), layer(1)))
    cache = make(ctx_size=1000, blocks=18, config=config)
    windowed, whole = cache.groups
    for start in (0, 1000):
        sequence = cache.sequence()
        extend(sequence, [start + i for i in range(1000)])
        sequence.close()
    assert whole.pool.touched == 16
    few = windowed.pool.touched
    assert few <= 7
    sequences = [cache.sequence() for _ in range(16)]
    for number, sequence in enumerate(sequences):
        extend(sequence, [number + 5000, 1, 2])
    assert windowed.pool.touched == 16 > few
    for sequence in sequences:
        check(sequence)


def test_a_prefix_is_found_as_far_as_a_window_reaches_back() -> None:
    config = replace(CONFIG, layers=(layer(0, 100), layer(1)))
    cache = make(ctx_size=1000, blocks=40, config=config)
    tokens = [(7 * i) % 300 for i in range(1000)]
    sequence = cache.sequence()
    extend(sequence, tokens)
    sequence.close()
    assert cache.cached_prefix(tokens) == 1000
    assert cache.cached_prefix(tokens[:990]) == 990
    # what lies further back lost its blocks to what came behind it
    other = cache.sequence([*tokens[:300], 5, 6])
    assert len(other) in (0, 128, 256, 300)
    check(other)


def test_what_was_shifted_is_found_by_nobody() -> None:
    cache = make()
    sequence = filled(cache, 500)
    other = sequence.fork()
    sequence.shift(keep=140, discard=100)
    tokens = [*sequence.tokens, 7, 8, 9]
    extend(sequence, [7, 8, 9])
    branch = sequence.fork()
    sequence.close()
    branch.close()
    assert cache.cached_prefix(tokens) == 140
    check(other)  # nothing of what it shared was written to
    assert cache.cached_prefix(other.tokens) >= 384


def test_shift_and_back() -> None:
    cache = make()
    sequence = filled(cache, 500)
    sequence.shift(keep=140, discard=100)
    sequence.truncate(140)
    extend(sequence, list(range(120)))
    check(sequence)
    tokens = list(sequence.tokens)
    sequence.close()
    assert cache.cached_prefix(tokens) == 260


def test_shift_without_a_free_block() -> None:
    """Nothing has changed: what has moved could not be computed again with the same bits."""
    cache = make(blocks=5)
    sequence = filled(cache, 500)
    other = cache.sequence()
    extend(other, [1])
    tokens = list(sequence.tokens)
    with pytest.raises(CacheFullError):
        sequence.shift(keep=4, discard=200)
    assert sequence.tokens == tokens
    check(sequence)
    other.close()
    sequence.shift(keep=4, discard=200)
    assert len(sequence) == 300


@pytest.mark.parametrize(
    ("forked", "keep", "discard"), [(False, 4, 200), (True, 130, 128), (True, 250, 60)]
)
def test_a_shift_asks_for_no_block_more_than_it_takes(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, forked: bool, keep: int, discard: int
) -> None:
    """In pools with more and more room: it is refused where it would not come to its end."""

    def refused(blocks: int, *, unasked: bool) -> bool:
        sequence = filled(make(blocks=blocks, config=config), 500)
        fork = sequence.fork() if forked else None
        tokens = list(sequence.tokens)
        with monkeypatch.context() as patch:
            if unasked:
                patch.setattr(BlockPool, "require", lambda *_: None)
            try:
                sequence.shift(keep=keep, discard=discard)
            except CacheFullError:
                assert unasked or sequence.tokens == tokens
                return True
        assert fork is None or fork.tokens == tokens
        return False

    found = [refused(blocks, unasked=False) for blocks in range(5, 9)]
    assert found == [refused(blocks, unasked=True) for blocks in range(5, 9)]
    assert not found[-1]


def test_a_shift_takes_what_an_unreachable_fork_held() -> None:
    sequence = filled(make(blocks=5), 500)
    cycle: list[object] = [sequence.fork()]
    cycle.append(cycle)
    del cycle
    sequence.shift(keep=4, discard=200)
    assert len(sequence) == 300
