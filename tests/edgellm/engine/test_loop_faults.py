"""What goes wrong around a loop: interrupts, readers that vanish, hooks that raise, forks."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from edgellm import EdgeLLMError, OptionError, TokenizerError
from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.engine.context import Context
from edgellm.engine.request import Request
from edgellm.errors import CancelledError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class AlarmError(BaseException):
    """What a signal handler raises; like KeyboardInterrupt it is no Exception."""


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> str:
    """Of a tiny model that has been exported."""
    return str(load(str(tiny_model)).engine.bundle.path)


@pytest.fixture
def tiny(folder: str) -> LLM:
    return load(folder, ctx_size=4 * BLOCK, cache_size=16 * BLOCK)


@pytest.fixture
def alarm() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise AlarmError

    previous = signal.signal(signal.SIGALRM, handle)
    gc.disable()  # Python drops what is raised in a callback of its collector, hypothesis has one
    yield
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


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


@pytest.mark.usefixtures("alarm")
def test_no_interrupt_leaves_the_lock_of_a_deferred_change_taken(tiny: LLM) -> None:
    cache, rng = tiny.engine.cache, random.Random(1)
    ends = time.monotonic() + 1.5
    while time.monotonic() < ends:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 5e-5))
            for _ in range(1000):
                cache.soon(_nothing)
        except AlarmError:
            pass
        assert cache.lock.acquire(timeout=5)
        cache.lock.release()


def _nothing() -> None:
    pass


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
    session = llm.session()
    session.append(prompt(99, 2 * BLOCK + 40))
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not wrong:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.02))
            for _ in range(50):
                assert llm.generate(prompt(0, 20), **options).tokens == expected[0]
                session.generate(**{**options, "max_tokens": 5})
                session.rewind(rng.randrange(BLOCK, 2 * BLOCK))
        except AlarmError:
            alarms += 1
        except CancelledError:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
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


@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarms_at_random(tiny: LLM) -> None:
    assert interrupted_answers(tiny, seconds=3, seed=int(os.environ.get("SEED", 5))) > 20


def raising_once(error: BaseException, *, at: int) -> Any:
    """A logit filter that raises at its n-th call."""
    calls = iter(range(1, 10**9))

    def raising(scores: np.ndarray, tokens: Sequence[int]) -> None:
        if next(calls) == at:
            raise error

    return raising


def test_an_interrupt_while_another_answer_takes_its_piece(tiny: LLM) -> None:
    """It is for whoever steps; the other one has lost a token, says so, and its session goes on."""
    expected = tiny.generate(prompt(2, 50), max_tokens=30, **GREEDY).tokens
    with tiny.session() as session:
        session.append(prompt(1, 40))
        broken = session.stream(logit_filter=raising_once(AlarmError(), at=3), **GREEDY)
        next(broken)
        with pytest.raises(AlarmError):
            list(tiny.stream(prompt(3, 50), max_tokens=30, **GREEDY))
        with pytest.raises(CancelledError):
            list(broken)
        assert tiny.generate(prompt(2, 50), max_tokens=30, **GREEDY).tokens == expected
        assert len(session.generate(max_tokens=5, ignore_eos=True).tokens) == 5
    assert_idle(tiny)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_where_answers_to_one_prompt_part(tiny: LLM, at: int) -> None:
    """All but the one whose piece it was begin all the same."""
    options = tiny.generation_options(seed=1, max_tokens=4, ignore_eos=True)
    filtered, requests = raising_once(AlarmError(), at=at), []
    for _ in range(3):
        context = Context(tiny.engine)
        context.append("prompt", prompt(1, 300), parse_special=False)
        requests.append(Request(context, options, logit_filter=filtered, closes=True))
    requests[0].forks = requests[1:]
    tiny.engine.loop.submit(requests[0])
    with pytest.raises(AlarmError):
        list(tiny.stream(prompt(2, 20), max_tokens=30, **GREEDY))
    for request in requests:
        for _ in range(100):
            tiny.engine.loop.advance([request] if not request.finished else [])
    broken = [request for request in requests if request.error is not None]
    assert [type(request.error) for request in broken] == [CancelledError]
    tokens = [[p.token for p in r.pieces] for r in requests if r.error is None]
    assert tokens[0] == tokens[1]
    fresh = load(str(tiny.engine.bundle.path))
    expected = fresh.generate(prompt(1, 300), seed=1, max_tokens=4, ignore_eos=True)
    assert tokens[0] == [*expected.tokens, None]
    del context, request, requests, broken
    assert_idle(tiny)


def test_an_interrupt_before_a_finished_answer_leaves(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = tiny.engine.loop._batcher
    leave = batcher.leave

    def interrupted(request: Any) -> None:
        monkeypatch.setattr(batcher, "leave", leave)
        raise AlarmError

    with tiny.session() as session:
        session.append(prompt(1, 40))
        stream = session.stream(max_tokens=3, **GREEDY)
        next(stream)
        monkeypatch.setattr(batcher, "leave", interrupted)
        with pytest.raises(AlarmError):
            tiny.generate(prompt(2, 20), max_tokens=30, **GREEDY)
        assert len(list(stream)) == 3  # two tokens, and why it ended
        assert session.generate(max_tokens=2, **GREEDY).tokens
    assert_idle(tiny)


def test_text_that_cannot_be_made_is_an_error_of_its_own_answer(tiny: LLM) -> None:
    """Also where the answer ends by itself in somebody else's step."""

    def broken() -> str:
        raise TokenizerError("no text")

    cancel = threading.Event()
    with tiny.session() as session:
        session.append(prompt(1, 40))
        stream = session.stream(cancel=cancel, **GREEDY)
        next(stream)
        (request,) = tiny.engine.loop._batcher._live.values()
        request._answer.rest = broken  # type: ignore[method-assign]
        cancel.set()
        assert len(tiny.generate(prompt(2, 20), max_tokens=9, **GREEDY).tokens) == 9
        with pytest.raises(TokenizerError, match="no text"):
            list(stream)
    assert_idle(tiny)


def test_a_beginning_that_fails_is_an_error_of_its_own_answer(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokens = tiny.engine.cache, prompt(1, 40)
    cached_prefix = cache.cached_prefix

    def unreadable(asked: Sequence[int]) -> int:
        if list(asked) == tokens[:-1]:
            raise OSError("no disk")
        return cached_prefix(asked)

    monkeypatch.setattr(cache, "cached_prefix", unreadable)
    failing = tiny.batch([tokens, prompt(2, 30)], max_tokens=5)
    answers = {answer.index: answer for answer in failing}
    assert isinstance(answers[0].error, OSError)
    assert answers[1].result().tokens
    assert_idle(tiny)


def test_what_nobody_has_read_of_a_closed_stream_is_no_part_of_the_session(tiny: LLM) -> None:
    """Also where others have computed more of it."""
    for company in (False, True):
        with tiny.session() as session:
            session.append(prompt(1, 40))
            stream = session.stream(**GREEDY)
            read = [next(stream).token for _ in range(3)]
            if company:
                tiny.generate(prompt(2, 40), max_tokens=20, **GREEDY)
            stream.close()
            assert session.tokens == (*prompt(1, 40), *read)
            assert session.cached <= len(session.tokens)
            rest = session.generate(max_tokens=4, **GREEDY).tokens
        whole = tiny.generate(prompt(1, 40), max_tokens=7, **GREEDY).tokens
        assert (*read, *rest) == whole
    assert_idle(tiny)


def test_two_threads_on_one_session(tiny: LLM) -> None:
    """One of them answers, or is told; tokens are those of whole answers."""
    for turn in range(20):
        with tiny.session() as session:
            session.append(prompt(turn, 40))
            barrier = threading.Barrier(2)
            results: list[object] = []

            def answer(
                session: Any = session, barrier: Any = barrier, results: Any = results
            ) -> None:
                barrier.wait()
                try:
                    results.append(session.generate(max_tokens=6, **GREEDY).tokens)
                except OptionError as error:
                    results.append(str(error))

            threads = [threading.Thread(target=answer) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=30)
            assert len(results) == 2
            answers = [each for each in results if isinstance(each, tuple)]
            assert all(a in session.tokens for answer in answers for a in answer)
            told = [each for each in results if isinstance(each, str)]
            assert all("already answering" in each or "changed" in each for each in told)
            assert session.tokens[:40] == tuple(prompt(turn, 40))
    assert_idle(tiny)


def test_closed_while_its_answer_is_on_its_way(tiny: LLM) -> None:
    """From another thread, at any moment: the session is empty, whatever a step still did."""
    rng, told = random.Random(1), list[str]()
    for turn in range(40):
        session = tiny.session()
        session.append(prompt(turn, 150))
        timer = threading.Timer(rng.uniform(0, 0.01), session.close)
        timer.start()
        try:
            session.generate(max_tokens=20, **GREEDY)
        except EdgeLLMError as error:
            told.append(str(error))
        timer.join()
        assert session.tokens == ()
        session.append([5, 6])
        assert session.tokens == (5, 6)
        session.close()
    del session
    assert [each for each in told if "changed" not in each and "empty" not in each] == []
    assert_idle(tiny)


def test_given_back_and_then_another_text(tiny_model: Path) -> None:
    """What was kept of a preempted answer is not taken for the tokens that came after."""
    small = load(
        str(tiny_model), ctx_size=4 * BLOCK, cache_size=4 * BLOCK, prefill="cpu", decode="portable"
    )
    expected = small.generate(prompt(7, 200), max_tokens=5, **GREEDY).tokens
    with small.session() as session:
        session.append(prompt(1, 2 * BLOCK))
        stream = session.stream(**GREEDY)
        next(stream)
        small.generate(prompt(2, 3 * BLOCK), max_tokens=4, **GREEDY)  # takes its place
        stream.close()
        session.replace(prompt(7, 200))
        assert session.generate(max_tokens=5, **GREEDY).tokens == expected


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_answers_or_refuses(tiny: LLM) -> None:
    expected = tiny.generate(prompt(1, 40), max_tokens=5, **GREEDY).tokens

    def in_child() -> str:
        try:
            same = tiny.generate(prompt(1, 40), max_tokens=5, **GREEDY).tokens == expected
            return "same" if same else "other"
        except OptionError as error:
            return str(error)

    assert forked(in_child) == "same"
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tiny.engine.lock:
            taken.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(30)
    try:
        assert "forked while another thread" in forked(in_child)
    finally:
        done.set()
        thread.join()
    assert tiny.generate(prompt(1, 40), max_tokens=5, **GREEDY).tokens == expected


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


@pytest.mark.slow
@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarms_for_long(tiny: LLM) -> None:
    for seed in range(3):
        interrupted_answers(tiny, seconds=8, seed=seed)
