"""A cache of groups with and without windows, of sealed blocks, or with a budget, whose rows hold
their tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from inspection import free_blocks

from edgellm.cache.disk_cache import DiskCache
from edgellm.cache.eviction import Sinks
from edgellm.cache.groups import CacheGroup, cache_groups, rope_frequencies
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope
from edgellm.kernels.kv_append import append
from edgellm.kernels.kv_blocks import BLOCK, KVBlocks
from edgellm.kernels.sealed_blocks import sealed_end

CTX, VALUE = 1200, 8
# In place of windows: a layer whose full blocks are sealed, alone or beside one with a window.
SEALED = ("k4v4",)
MIXED = (130, "k4v4")
# In place of windows: layers whose first block and last two stay, beside one with a window.
BUDGET = ("sinks", 300)


def make(
    windows: tuple[int | str | None, ...], folder: Path | None = None, blocks: int = 40
) -> KVCache:
    config = ModelConfig(
        model_type="llama",
        vocab_size=320,
        hidden_size=32,
        layers=tuple(
            LayerConfig(
                mixer=Attention(heads=4, kv_heads=1, head_dim=VALUE, window=window)
                if isinstance(window, int)
                else Attention(heads=4, kv_heads=1, head_dim=VALUE),
                mlp=Mlp(intermediate=32),
            )
            for window in windows
        ),
        ropes=(Rope(inv_freq=(1.0, 0.1)),),
        norm_eps=1e-5,
        context_length=2048,
        tied_embedding=True,
    )
    cache = KVCache(
        cache_groups(config),
        format="k4v4" if "k4v4" in windows else "f32",
        ctx_size=CTX,
        blocks=blocks,
        policy=Sinks(2) if windows == BUDGET else None,
        fingerprint=b"x",
        rope_frequencies=rope_frequencies(config),
    )
    if folder is not None:
        cache.disk = DiskCache(folder, budget=1 << 30)
    return cache


def extend(cache: KVCache, sequence: Sequence, tokens: list[int]) -> None:
    """Rows of a token hold the token."""
    for begin in range(0, len(tokens), 50):
        part = tokens[begin : begin + 50]
        with sequence.reserved(len(part)):
            sequence.use_host()
            rows = np.repeat(np.array(part, np.float32), VALUE).reshape(-1, 1, VALUE)
            for layer in range(len(cache.places)):
                view, slot = sequence.view(layer)
                append(view.blocks, view.table, slot, len(sequence), rows, rows)
            seal(cache, sequence, len(part))
            sequence.commit(part)


def seal(cache: KVCache, sequence: Sequence, count: int) -> None:
    """Write the tokens of each block that `count` more rows seal to its sealed block."""
    if cache.format == "f32":
        return
    *_, hot, sealed = sequence.tables
    for number in range(sealed_end(len(sequence)), sealed_end(len(sequence) + count)):
        block, into = hot.at(number), sealed.at(number)
        assert block is not None
        assert into is not None
        assert sealed.store.pool.references(into) == 1
        sealed.store.blocks.arrays[3][into, 0, 0, 0] = row_tokens(hot.store.kv, block)


def row_tokens(blocks: KVBlocks, block: int) -> np.ndarray:
    """The tokens of a block's rows, each of which is the largest number of its row of V."""
    if blocks.v_scale is None:
        return np.array([blocks.value_rows(block, 0, row)[0, 0] for row in range(BLOCK)])
    spread = np.sqrt(VALUE) if blocks.format in SEALED else 1
    with np.errstate(all="ignore"):  # rows that were never written
        return np.rint(127 * blocks.v_scale[block, 0, 0] / spread)


def check_sealed(sequence: Sequence) -> None:
    """What the next token reads is right."""
    for table in sequence.tables:
        for number in table.store.group.seen(len(sequence)):
            block, tokens = table.at(number), sequence.tokens[number * BLOCK :][:BLOCK]
            assert block is not None
            blocks = table.store.blocks
            if isinstance(blocks, KVBlocks):
                rows = row_tokens(blocks, block)
            else:
                rows = blocks.arrays[3][block, 0, 0, 0]
            assert rows[: len(tokens)].tolist() == tokens, number


def check(cache: KVCache, sequence: Sequence) -> None:
    """What the next token sees is right, and nothing is free that is held."""
    if cache.format != "f32":
        check_sealed(sequence)
    for layer, (group, _) in enumerate(cache.places if cache.format == "f32" else ()):
        view, slot = sequence.view(layer)
        here = cache.groups[group].group
        assert isinstance(here, CacheGroup)
        first = 0 if here.window is None else max(0, len(sequence) + 1 - here.window)
        seen = set(here.seen(len(sequence)))
        for position in range(first, len(sequence)):
            if position // BLOCK not in seen:
                assert here.policy is not None
                continue
            block = sequence.tables[group].at(position // BLOCK)
            assert block is not None
            row = view.blocks.value_rows(block, slot, position % BLOCK)
            assert (row == sequence.tokens[position]).all(), (layer, position)
    for store in cache.groups:
        free, _ = free_blocks(store.pool)
        assert len(set(free)) == len(free)
        assert not any(store.pool.references(block) for block in free)


def new(cache: KVCache, tokens: list[int]) -> Sequence:
    sequence = cache.sequence()
    extend(cache, sequence, tokens)
    return sequence
