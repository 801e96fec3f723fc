"""Exceptions of signal handlers while several answers are on their way."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from loop_checks import GREEDY, AlarmError, assert_idle, prompt, raising_once

from edgellm.engine.context import Context
from edgellm.engine.request import Request
from edgellm.errors import CancelledError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load


@pytest.mark.usefixtures("alarm")
def test_no_interrupt_leaves_the_lock_of_a_deferred_change_taken(tiny: LLM) -> None:
    cache, rng = tiny.engine.cache, random.Random(1)
    ends = time.monotonic() + 1.5
    while time.monotonic() < ends:
        try:
            with alarm_after(rng.uniform(2e-6, 5e-5)):
                for _ in range(1000):
                    cache.soon(_nothing)
        except AlarmError:
            pass
        assert cache.lock.acquire(timeout=5)
        cache.lock.release()


def _nothing() -> None:
    pass


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


@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarms_at_random(tiny: LLM) -> None:
    assert interrupted_answers(tiny, seconds=3, seed=int(os.environ.get("SEED", 5))) > 20


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


@pytest.mark.slow
@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarms_for_long(tiny: LLM) -> None:
    for seed in range(3):
        interrupted_answers(tiny, seconds=8, seed=seed)
