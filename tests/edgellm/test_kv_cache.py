"""Sharing, copying, forgetting: K and V hold each token's position and owner, so a mix-up shows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm import (
    CacheFullError,
    ContextOverflowError,
    OptionError,
    UnsupportedModelError,
)
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=320,
    hidden_size=32,
    layers=tuple(
        LayerConfig(
            attention=Attention(heads=2, kv_heads=1, head_dim=16, rope=rope),
            mlp=Mlp(intermediate=32),
        )
        for rope in (0, 1)
    ),
    ropes=(Rope(inv_freq=(1.0, 0.1), magnitude=1.3), Rope(inv_freq=(0.5, 0.0))),
    norm_eps=1e-5,
    context_length=1024,
    tied_embedding=True,
)


def make(ctx_size: int = 600, blocks: int = 12) -> KVCache:
    return KVCache(CONFIG, format="f32", ctx_size=ctx_size, blocks=blocks, fingerprint=b"x")


def extend(sequence: Sequence, tokens: list[int]) -> None:
    """Append tokens whose K and V are functions of the tokens so far."""
    for token in tokens:
        sequence.reserve(1)
        value = key([*sequence.tokens, token])
        rows = np.full((1, CONFIG.kv_heads, CONFIG.head_dim), value, np.float32)
        for layer in range(CONFIG.layer_count):
            append(sequence.blocks, sequence.table, layer, len(sequence), rows, rows)
        sequence.commit([token])


def key(tokens: list[int]) -> float:
    return float(hash(tuple(tokens)) % 100_003)


def check(sequence: Sequence) -> None:
    """Every row is what this sequence's own tokens make it."""
    for position in range(len(sequence)):
        block, row = sequence.table[position // BLOCK], position % BLOCK
        expected = key(sequence.tokens[: position + 1])
        for layer in range(CONFIG.layer_count):
            assert (sequence.blocks.key_rows(block, layer, row) == expected).all(), position
            assert (sequence.blocks.value_rows(block, layer, row) == expected).all(), position


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
def test_fork_and_rewind_at_any_token(at: int) -> None:
    cache = make()
    trunk = cache.sequence()
    extend(trunk, list(range(300)))
    branch = trunk.fork()
    branch.truncate(at)
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
    with pytest.raises(OptionError, match="int8, int4, f16, f32"):
        KVCache(CONFIG, format="int2", ctx_size=1, blocks=1, fingerprint=b"")  # type: ignore[arg-type]


def test_int4_takes_heads_of_a_multiple_of_8() -> None:
    attention = Attention(heads=8, kv_heads=8, head_dim=20)
    odd = replace(
        CONFIG,
        layers=(replace(CONFIG.layers[0], attention=attention),),
        ropes=(Rope(inv_freq=(1.0, 0.1, 0.01)),),
    )
    with pytest.raises(OptionError, match="head_dim is 20"):
        KVCache(odd, format="int4", ctx_size=1, blocks=1, fingerprint=b"")


@settings(max_examples=60, deadline=None)
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
def test_any_history_keeps_every_sequence_whole(steps: list[tuple[str, int, int]]) -> None:
    cache = make(ctx_size=300, blocks=40)
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
    extend(sequence, [(5 * i) % 300 for i in range(count)])
    return sequence


@pytest.mark.parametrize(
    ("count", "keep", "discard"),
    [(600, 4, 298), (600, 0, 1), (600, 128, 128), (600, 130, 300), (300, 200, 99), (140, 4, 130)],
)
def test_shift_moves_values_and_turns_keys(count: int, keep: int, discard: int) -> None:
    cache = make()
    sequence = filled(cache, count)
    before = [key(sequence.tokens[: i + 1]) for i in range(count)]
    tokens = list(sequence.tokens)
    sequence.shift(keep=keep, discard=discard)
    assert sequence.tokens == tokens[:keep] + tokens[keep + discard :]
    for layer, position in itertools.product(range(2), range(len(sequence))):
        angles = -discard * np.array(CONFIG.rope_of(layer).inv_freq)
        block, row = sequence.table[position // BLOCK], position % BLOCK
        stays = position < keep
        value = before[position if stays else position + discard]
        turned = np.full(CONFIG.head_dim, value)
        if not stays:
            turned[:2] = value * (np.cos(angles) - np.sin(angles))
            turned[2:4] = value * (np.cos(angles) + np.sin(angles))
        assert (cache.blocks.value_rows(block, layer, row) == np.float32(value)).all()
        np.testing.assert_allclose(cache.blocks.key_rows(block, layer, row)[0], turned, atol=0.02)
    sequence.close()
    assert cache.used_blocks == 0


def test_keys_that_are_scaled_after_rope_do_not_turn() -> None:
    layers = tuple(
        replace(layer, attention=replace(layer.attention, qk_norm="head_after_rope"))
        for layer in CONFIG.layers
    )
    config = replace(CONFIG, layers=layers)
    cache = KVCache(config, format="f32", ctx_size=600, blocks=12, fingerprint=b"x")
    sequence = filled(cache, 300)
    with pytest.raises(UnsupportedModelError, match=r"scales keys after RoPE.*`context_policy`"):
        sequence.shift(keep=4, discard=100)
    check(sequence)


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
    cache = make(blocks=5)
    sequence = filled(cache, 500)
    other = cache.sequence()
    extend(other, [1])
    tokens = list(sequence.tokens)
    with pytest.raises(CacheFullError):
        sequence.shift(keep=4, discard=200)
    assert sequence.tokens == []  # not even the first block could be moved to
    other.close()
    extend(sequence, tokens[:300])
    check(sequence)
    sequence.shift(keep=4, discard=200)
    assert len(sequence) == 100
