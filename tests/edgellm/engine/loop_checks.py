"""What tests of faults around the loop share."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class AlarmError(BaseException):
    """What a signal handler raises; like KeyboardInterrupt it is no Exception."""


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


def check_pools(llm: LLM) -> int:
    """Blocks that are held, after a look at whether all counts agree."""
    cache = llm.engine.cache
    gc.collect()
    with llm.engine.lock, cache.change():
        held = [[0] * group.blocks.count for group in cache.groups]
        for sequence in [
            s for s in gc.get_objects() if type(s) is CachedSequence and hasattr(s, "tables")
        ]:
            if sequence._cache is cache:
                for table, counts in zip(sequence.tables, held, strict=True):
                    assert len(table.ids) == -(-len(sequence) // BLOCK)
                    for block in table.held:
                        counts[block] += 1
        for group, counts in zip(cache.groups, held, strict=True):
            pool = group.pool
            assert [pool.references(block) for block in range(len(counts))] == counts
            free = {block for block in range(pool.touched) if not counts[block]}
            assert set(pool._free) | set(pool._idle) == free
            assert len(pool._free) + len(pool._idle) == len(free)
            assert all(cache.index.holds(group.number, block) for block in pool._idle)
        return cache.used_blocks


def assert_idle(llm: LLM) -> None:
    """Nothing is left of any answer."""
    batcher = llm.engine.loop._batcher
    assert check_pools(llm) == 0
    assert not batcher._live
    assert not batcher._scheduler.running
    assert not batcher._scheduler.waiting


def raising_once(error: BaseException, *, at: int) -> Any:
    """A logit filter that raises at its n-th call."""
    calls = iter(range(1, 10**9))

    def raising(scores: np.ndarray, tokens: Sequence[int]) -> None:
        if next(calls) == at:
            raise error

    return raising
