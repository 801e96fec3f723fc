"""What tests of faults around the loop share."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.engine.step_costs import StepCosts, StepLoad
from edgellm.errors import CancelledError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class AlarmError(BaseException):
    """What a signal handler raises; like KeyboardInterrupt it is no Exception."""


class FixedCosts(StepCosts):
    """Predicts for ever that a row takes so many seconds: what steps have is the same anywhere."""

    def __init__(self, row: float) -> None:
        super().__init__()
        self._row = row

    def seconds(self, load: StepLoad) -> float:
        return self._row * load.rows

    def learn(self, load: StepLoad, seconds: float) -> None:
        pass


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


def poison_given_back(group: Any) -> None:
    """Fill blocks with NaN when they are given back and nobody can find them, and when taken."""
    pool, release, allocate = group.pool, group.pool.release, group.pool.allocate

    def fill(block: int) -> None:
        for array in group.blocks.block(block):
            array[...] = np.nan

    def released(block: int) -> None:
        release(block)
        if not pool.references(block) and block not in pool:
            fill(block)

    def allocated() -> int:
        block: int = allocate()
        fill(block)
        return block

    pool.release, pool.allocate = released, allocated


def until(true: Callable[[], bool], *, seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.001)


def raising_once(error: BaseException, *, at: int) -> Any:
    """A logit filter that raises at its n-th call."""
    calls = iter(range(1, 10**9))

    def raising(scores: np.ndarray, tokens: Sequence[int]) -> None:
        if next(calls) == at:
            raise error

    return raising


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """An AlarmError in what is done within, if that takes so long; none comes afterwards."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupted_answers(llm: LLM, *, seconds: float, seed: int) -> int:
    """Answers in this thread with an alarm in the middle, while others have streams open."""
    rng, alarms, stop = random.Random(seed), 0, threading.Event()
    options = {**GREEDY, "max_tokens": 40}
    expected = {i: llm.generate(prompt(i, 20 + 30 * i), **options).tokens for i in range(4)}
    wrong: list[object] = []

    def answer(i: int) -> None:
        while not stop.is_set():
            try:
                tokens = llm.generate(prompt(i, 20 + 30 * i), **options).tokens
            except CancelledError:
                continue  # its piece was taken when the alarm came
            except Exception as error:
                wrong.append(error)
                return
            if tokens != expected[i]:
                wrong.append((i, tokens))

    threads = [threading.Thread(target=answer, args=(i,), daemon=True) for i in (1, 2, 3)]
    for thread in threads:
        thread.start()
    session, long = llm.session(), prompt(99, 2 * BLOCK + 40)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not wrong:
        try:
            with alarm_after(rng.uniform(1e-4, 0.02)):
                for _ in range(50):
                    assert llm.generate(prompt(0, 20), **options).tokens == expected[0]
                    session.rewind(min(rng.randrange(BLOCK, 2 * BLOCK), len(session.tokens)))
                    session.append(long[len(session.tokens) :])
                    session.generate(**{**options, "max_tokens": 5})
        except AlarmError:
            alarms += 1
        except CancelledError:
            pass
    stop.set()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert not wrong
    session.close()
    del session
    assert_idle(llm)
    assert llm.generate(prompt(3, 110), **options).tokens == expected[3]
    return alarms


def forked(call: Any) -> str:
    """What a call gives in a child, which has half a minute."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            os.write(writer, call().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text
