"""Readers that are slow, or many, or vanish."""

from __future__ import annotations

import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from loop_checks import GREEDY, assert_idle, prompt, raising_once

from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load


class UnfairLock:
    """Whoever waits for it looks seldom, as threads do whose cores are busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.locked, self.release = self._lock.locked, self._lock.release

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        start = time.monotonic()
        while not self._lock.acquire(blocking=False):
            if not blocking or 0 <= timeout < time.monotonic() - start:
                return False
            time.sleep(0.04 if timeout < 0 else timeout)
        return True

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_readers_take_their_pieces_while_others_step(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the lock of a loop that never stops stepping has to get away from it."""
    batcher, cache = tiny.engine.loop._batcher, tiny.engine.cache
    step, change = batcher.step, cache.change
    monkeypatch.setattr(cache, "_lock", UnfairLock())
    # others look at the loop while one has the lock and does not step yet
    monkeypatch.setattr(cache, "change", lambda: (time.sleep(0.001), change())[1])
    monkeypatch.setattr(batcher, "step", lambda: (time.sleep(0.01), step())[1])
    counts, unread = tiny.engine.loop.counts, list[int]()

    def read(seed: int) -> None:
        requests = tiny.stream(
            prompt(seed, 40), max_tokens=150, ignore_eos=True, speculate=False, seed=1
        )
        first = 0
        for taken, _ in enumerate(requests):
            first = first or counts.steps
            unread.append(counts.steps - first - taken)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(unread) < 12, sorted(unread)[-9:]


def test_a_slow_reader_gives_its_place_while_others_decode(folder: str) -> None:
    small = load(folder, ctx_size=4 * BLOCK, cache_size=5 * BLOCK)
    slow = small.stream(prompt(1, 2 * BLOCK), max_tokens=200, **GREEDY)
    fast = small.stream(prompt(2, 20), max_tokens=100, **GREEDY)
    next(slow)
    for _ in range(80):
        next(fast)  # by now the slow one has more than it has read
    third = small.stream(prompt(3, 2 * BLOCK + 5), max_tokens=3, **GREEDY)
    next(third)
    assert small.engine.loop.counts.admitted == 3
    assert next(fast).token is not None  # and this one has not ended
    assert len(list(slow)) >= 199
    fast.close()
    third.close()
    assert_idle(small)


def test_a_time_limit_ends_who_waits_for_a_place(folder: str) -> None:
    small = load(folder, ctx_size=4 * BLOCK, cache_size=4 * BLOCK)
    first = small.stream(prompt(1, 3 * BLOCK), max_tokens=100, **GREEDY)
    next(first)
    answer: list[Any] = []

    def wait() -> None:
        tokens = prompt(2, 3 * BLOCK)
        answer.append(small.generate(tokens, time_limit_ms=20, max_tokens=50, **GREEDY))

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        next(first, None)
    assert answer[0].finish_reason == "time"
    first.close()
    assert_idle(small)


def test_hundreds_of_threads(tiny: LLM) -> None:
    count, threads = 300, threading.active_count()
    options = {**GREEDY, "max_tokens": 3}
    expected = [tiny.generate(prompt(i, 10 + i), **options).tokens for i in range(5)]
    with ThreadPoolExecutor(count) as pool:
        answers = [
            pool.submit(tiny.generate, prompt(i % 5, 10 + i % 5), **options) for i in range(count)
        ]
        for i, answer in enumerate(answers):
            assert answer.result(timeout=60).tokens == expected[i % 5]
    assert threading.active_count() == threads
    assert_idle(tiny)


def vanish(llm: LLM, rng: random.Random) -> None:
    """An answer that ends in one of the ways that answers end."""
    tokens, cancel = prompt(rng.randrange(10**6), rng.randint(1, 400)), threading.Event()
    stream = llm.stream(tokens, cancel=cancel, max_tokens=30, ignore_eos=True)
    kind = rng.choice(["cancel", "close", "drop", "cycle", "session", "batch", "raise"])
    if kind == "batch":
        answers = llm.batch([tokens, tokens[:9]], n=2, max_tokens=rng.randint(1, 9))
        next(answers)
        return
    if kind == "raise":
        failing = raising_once(RuntimeError("no more"), at=rng.randint(1, 4))
        with pytest.raises(RuntimeError):
            llm.generate(tokens, max_tokens=9, ignore_eos=True, logit_filter=failing)
        return
    if kind == "session":
        session = llm.session()
        session.append(tokens)
        stream = session.fork().stream(max_tokens=30, ignore_eos=True)
    for _ in range(rng.randint(0, 5)):
        next(stream)
    if kind == "cancel":
        cancel.set()
        list(stream)
    elif kind == "close":
        stream.close()
    elif kind == "cycle":
        cycle: list[object] = [stream]
        cycle.append(cycle)


def vanishing(llm: LLM, *, count: int) -> None:
    """Twice as many of them, in threads; afterwards all is as before."""
    threads = threading.active_count()
    expected = llm.generate(prompt(1, 100), max_tokens=20, **GREEDY).tokens

    def some(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(count // 8):
            vanish(llm, rng)

    def all_of_them(seed: int) -> None:
        with ThreadPoolExecutor(9) as pool:
            running = [pool.submit(some, seed + i) for i in range(8)]
            answer = pool.submit(llm.generate, prompt(1, 100), max_tokens=20, **GREEDY)
            assert answer.result(timeout=120).tokens == expected
            for each in running:
                each.result(timeout=120)

    all_of_them(0)
    assert_idle(llm)
    before = memory(llm)
    all_of_them(100)
    assert_idle(llm)
    assert memory(llm) < before * 1.02 + 500
    assert threading.active_count() == threads


def memory(llm: LLM) -> int:
    """Objects of Python's that the collector knows, without those of cached prefixes."""
    llm.engine.cache.index.__init__(b"", llm.engine.cache.index._groups)  # type: ignore[misc]
    gc.collect()
    return len(gc.get_objects())


def test_answers_that_vanish(tiny: LLM) -> None:
    vanishing(tiny, count=80)


@pytest.mark.slow
def test_a_thousand_answers_that_vanish(tiny: LLM) -> None:
    vanishing(tiny, count=500)  # twice
