"""Caches whose states are functions of all tokens, so that a mix-up shows."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from edgellm.cache.groups import CacheGroup, Group, StateGroup
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK

VALUE = 8
GROUPS: dict[str, tuple[Group, ...]] = {
    "states": (StateGroup((0, 1), elements=3),),
    "and layers that attend": (CacheGroup((0, 2), None, 1, VALUE), StateGroup((1,), elements=5)),
    "and windows": (StateGroup((0, 2), elements=1), CacheGroup((1,), 40, 1, VALUE)),
}
# Large states: a snapshot every 512 tokens.
SPARSE: tuple[Group, ...] = (
    StateGroup((0,), elements=2, interval=4),
    CacheGroup((1,), None, 1, VALUE),
)


def make(groups: tuple[Group, ...], *, ctx_size: int = 1000, blocks: int = 24) -> KVCache:
    cache = KVCache(groups, format="f32", ctx_size=ctx_size, blocks=blocks, fingerprint=b"x")
    for store in cache.groups:
        for array in store.blocks.arrays:
            array[...] = np.nan
    return cache


def folded(layer: int, tokens: SequenceOf[int], state: float = 0.0) -> float:
    """A layer's state after tokens; whole numbers that float32 holds."""
    for token in tokens:
        state = (state * 31 + token + layer + 1) % 65521
    return state


def compute(
    cache: KVCache, sequence: Sequence, tokens: list[int], *, in_place: bool = False
) -> None:
    """A step of a back end, within a reservation."""
    start, end = len(sequence), len(sequence) + len(tokens)
    rows = np.repeat(np.array(tokens, np.float32), VALUE).reshape(-1, 1, VALUE)
    for layer, (group, slot) in enumerate(cache.places):
        if isinstance(cache.groups[group].group, CacheGroup):
            kv, slot = sequence.view(layer)
            append(kv.blocks, kv.table, slot, start, rows, rows)
            continue
        view = sequence.states(start, end)[group]
        assert view is not None
        state, done = 0.0, 0
        if view.source is not None:
            (state,) = set(view.blocks.states[view.source, slot].tolist())
        for count, block in view.targets:
            state, done = folded(layer, tokens[done:count], state), count
            assert block != view.source or in_place
            view.blocks.states[block, slot] = state


def extend(cache: KVCache, sequence: Sequence, tokens: list[int], *, rows: int = 512) -> None:
    for begin in range(0, len(tokens), rows):
        part = tokens[begin : begin + rows]
        with sequence.reserved(len(part)):
            compute(cache, sequence, part)
            sequence.commit(part)


def check(cache: KVCache, sequence: Sequence) -> None:
    """The next token finds the states after all tokens, and the K and V that it sees."""
    length = len(sequence)
    with sequence.reserved(1):
        for layer, (group, slot) in enumerate(cache.places):
            kind = cache.groups[group].group
            if isinstance(kind, StateGroup):
                view = sequence.states(length, length + 1)[group]
                assert view is not None
                assert (view.source is None) == (length == 0)
                if view.source is not None:
                    found = view.blocks.states[view.source, slot]
                    assert (found == folded(layer, sequence.tokens)).all(), (layer, length)
                continue
            kv, slot = sequence.view(layer)
            first = 0 if kind.window is None else max(0, length + 1 - kind.window)
            for position in range(first, length):
                block = sequence.tables[group].at(position // BLOCK)
                assert block is not None
                row = kv.blocks.value_rows(block, slot, position % BLOCK)
                assert (row == sequence.tokens[position]).all(), (layer, position)


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, length).tolist()


def begun(cache: KVCache, tokens: list[int], *, rows: int = 512) -> Sequence:
    """A sequence of tokens, of which the cached prefix is not computed."""
    sequence = cache.sequence(tokens)
    extend(cache, sequence, tokens[len(sequence) :], rows=rows)
    check(cache, sequence)
    return sequence
