"""Exceptions of signal handlers while several answers are on their way."""

from __future__ import annotations

import os
import random

import pytest
from inspection import watch_leaving
from loop_checks import (
    AlarmError,
    alarm_after,
    answers_interrupted_at,
    answers_with_alarms,
    assert_idle,
    interrupted,
    raising_once,
)
from loops import GREEDY, prompt

from edgellm.engine.context import Context
from edgellm.engine.request import Request
from edgellm.errors import CancelledError
from edgellm.llm import LLM, load


@pytest.mark.usefixtures("alarm")
def test_no_interrupt_leaves_the_lock_of_a_deferred_change_taken(tiny: LLM) -> None:
    """At each moment of it where Python handles signals."""
    cache, at = tiny.engine.cache, 1
    while interrupted(lambda: cache.soon(_nothing), at=at, events=("call", "c_return")):
        assert cache.lock.acquire(timeout=0), f"after the interrupt at event {at}"
        cache.lock.release()
        at += 1
    assert at > 5


def _nothing() -> None:
    pass


@pytest.mark.slow
@pytest.mark.usefixtures("alarm")
def test_no_alarm_leaves_the_lock_of_a_deferred_change_taken(tiny: LLM) -> None:
    cache, rng = tiny.engine.cache, random.Random(1)
    for _ in range(10_000):
        try:
            with alarm_after(rng.uniform(2e-6, 5e-5)):
                for _ in range(1000):
                    cache.soon(_nothing)
        except AlarmError:
            pass
        assert cache.lock.acquire(timeout=0)
        cache.lock.release()


@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_call(tiny: LLM) -> None:
    answers_interrupted_at(tiny, range(1, 3000, 61))


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
    def interrupted(request: Request) -> None:
        monkeypatch.undo()
        raise AlarmError

    with tiny.session() as session:
        session.append(prompt(1, 40))
        stream = session.stream(max_tokens=3, **GREEDY)
        next(stream)
        watch_leaving(tiny, monkeypatch, interrupted)
        with pytest.raises(AlarmError):
            tiny.generate(prompt(2, 20), max_tokens=30, **GREEDY)
        assert len(list(stream)) == 3  # two tokens, and why it ended
        assert session.generate(max_tokens=2, **GREEDY).tokens
    assert_idle(tiny)


@pytest.mark.slow
@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 3))))
def test_alarms_at_random(tiny: LLM, seed: int) -> None:
    answers_with_alarms(tiny, alarms=150, seed=seed)
