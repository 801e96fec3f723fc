"""What tests of faults around the loop share."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
from inspection import (
    free_blocks,
    known_sequences,
    live,
    results,
    running,
    used_blocks,
    waiting,
    watch_steps,
)
from loops import GREEDY, Call, begin_together, prompt

from edgellm import Completion
from edgellm.cache.group_table import StateTable
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM


class AlarmError(BaseException):
    """What a signal handler raises; like KeyboardInterrupt it is no Exception."""


def check_pools(llm: LLM) -> int:
    """Blocks that are held, after a look at whether all counts agree."""
    cache = llm.engine.cache

    def check() -> int:
        cache.close_dropped()  # the command for it may be behind this one
        held = [[0] * group.blocks.count for group in cache.groups]
        for sequence in known_sequences(llm):
            for table, counts in zip(sequence.tables, held, strict=True):
                if not isinstance(table, StateTable):
                    assert len(table.ids) == -(-len(sequence) // BLOCK)
                for block in table.held:
                    counts[block] += 1
        for group, counts in zip(cache.groups, held, strict=True):
            pool = group.pool
            assert [pool.references(block) for block in range(len(counts))] == counts
            free = {block for block in range(pool.touched) if not counts[block]}
            empty, idle = free_blocks(pool)
            assert {*empty, *idle} == free
            assert len(empty) + len(idle) == len(free)
            assert all(cache.index.holds(group.number, block) for block in idle)
        return cache.used_blocks

    return llm.engine.thread.call(check)


def assert_idle(llm: LLM) -> None:
    """Nothing is left of any answer."""
    if used_blocks(llm):
        gc.collect()  # a traceback may hold a session
    assert check_pools(llm) == 0
    assert not live(llm)
    assert not running(llm)
    assert not waiting(llm)


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


def raising_once(error: BaseException, *, at: int) -> Any:
    """A logit filter that raises at its n-th call."""
    calls = iter(range(1, 10**9))

    def raising(scores: np.ndarray, tokens: Sequence[int]) -> None:
        if next(calls) == at:
            raise error

    return raising


def cancelled_at_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, calls: Sequence[Call], *, at: Sequence[int]
) -> list[Completion]:
    """Answers beside which others are cancelled, one before each of these steps; 0: before any."""
    cancels = [threading.Event() for _ in at]
    steps = iter(range(1, 10**9))

    def cancel(number: int) -> None:
        for event, when in zip(cancels, at, strict=True):
            if when == number:
                event.set()

    def around(step: Callable[[], None]) -> None:
        cancel(next(steps))
        step()

    watch_steps(llm, monkeypatch, around)
    cancel(0)
    others: list[Call] = [
        (prompt(1000 + i, (5, 400, 130)[i % 3]), {**GREEDY, "cancel": event})
        for i, event in enumerate(cancels)
    ]
    with ThreadPoolExecutor(len(calls) + len(others)) as pool:
        found = results(begin_together(pool, llm, [*others, *calls]))
    assert [each.finish_reason for each in found[: len(others)]] == ["cancelled"] * len(others)
    return found[len(others) :]


def cancel_after(llm: LLM, rng: random.Random, i: int, *, prompt_at_most: int = 900) -> None:
    """Cancel an answer to the prompt with number `i` after up to 0.03 seconds."""
    cancel = threading.Event()
    timer = threading.Timer(rng.random() * 0.03, cancel.set)
    timer.start()
    tokens = prompt(1000 + i, rng.randint(2, prompt_at_most))
    answer = llm.generate(tokens, cancel=cancel, max_tokens=60, ignore_eos=True)
    assert answer.finish_reason in ("cancelled", "length")
    timer.join()


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """An AlarmError in what is done within, if that takes so long; none comes afterwards."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupted(call: Callable[[], object], *, at: int) -> bool | None:
    """Whether an interrupt at the n-th call of a Python function in this thread ended it; None: it
    had ended before, as it waited less often than another time."""
    left = at

    def strike(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= event == "call"
        if left == 0:
            sys.setprofile(None)
            raise AlarmError

    sys.setprofile(strike)
    try:
        call()
    except AlarmError:
        return True
    finally:
        sys.setprofile(None)
    return None if left > 0 else False


def assert_interrupted(found: Sequence[bool | None]) -> None:
    """Python drops some interrupts, those in callbacks."""
    struck = [ended for ended in found if ended is not None]
    assert sum(struck) > 0.8 * len(struck) > 0


def calls_of(call: Callable[[], object]) -> int:
    """Calls of Python functions in this thread within a call."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def answers_interrupted(llm: LLM, *, times: int) -> None:
    """Answers of this thread while two others are on their way, interrupted at so many calls of
    Python functions, from the first to the last."""
    options, found = {**GREEDY, "max_tokens": 12}, list[bool | None]()
    expected = [llm.generate(prompt(i, 20 + 60 * i), **options).tokens for i in range(3)]
    session, long = llm.session(), prompt(99, 2 * BLOCK + 40)

    def answer() -> None:
        assert llm.generate(prompt(0, 20), **options).tokens == expected[0]
        session.rewind(min(BLOCK, len(session.tokens)))
        session.append(long[len(session.tokens) :])
        session.generate(**{**options, "max_tokens": 5})

    answer()
    calls = calls_of(answer)
    moments = range(1, calls, max(1, calls // times))
    for at in moments:
        others = [llm.stream(prompt(i, 20 + 60 * i), **options) for i in (1, 2)]
        begun = [[next(stream).token] for stream in others]
        found.append(interrupted(answer, at=at))
        for tokens, stream, wanted in zip(begun, others, expected[1:], strict=True):
            tokens += [piece.token for piece in stream if piece.token is not None]
            assert tuple(tokens) == wanted, f"after the interrupt at call {at}"
    session.close()
    assert_idle(llm)
    assert llm.generate(prompt(1, 80), **options).tokens == expected[1]
    assert_interrupted(found)


def answers_with_alarms(llm: LLM, *, alarms: int, seed: int) -> None:
    """Answers in this thread with so many alarms at random, while others have streams open."""
    rng, stop = random.Random(seed), threading.Event()
    options = {**GREEDY, "max_tokens": 40}
    expected = {i: llm.generate(prompt(i, 20 + 30 * i), **options).tokens for i in range(4)}
    wrong: list[object] = []

    def answer(i: int) -> None:
        while not stop.is_set():
            try:
                tokens = llm.generate(prompt(i, 20 + 30 * i), **options).tokens
            except Exception as error:
                wrong.append(error)
                return
            if tokens != expected[i]:
                wrong.append((i, tokens))

    threads = [threading.Thread(target=answer, args=(i,), daemon=True) for i in (1, 2, 3)]
    for thread in threads:
        thread.start()
    session, long = llm.session(), prompt(99, 2 * BLOCK + 40)
    while alarms and not wrong:
        try:
            with alarm_after(rng.uniform(1e-4, 0.02)):
                for _ in range(50):  # Python may drop an alarm
                    assert llm.generate(prompt(0, 20), **options).tokens == expected[0]
                    session.rewind(min(rng.randrange(BLOCK, 2 * BLOCK), len(session.tokens)))
                    session.append(long[len(session.tokens) :])
                    session.generate(**{**options, "max_tokens": 5})
        except AlarmError:
            alarms -= 1
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    session.close()
    del session
    assert_idle(llm)
    assert llm.generate(prompt(3, 110), **options).tokens == expected[3]


def forked(call: Any) -> str:
    """What a call gives in a child, which has two minutes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(120)
            os.write(writer, call().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text
