"""Exceptions of signal handlers while several answers are on their way."""

from __future__ import annotations

import os

import pytest
from inspection import paused, watch_leaving
from loop_checks import (
    AlarmError,
    alarm_after,
    answers_interrupted,
    answers_with_alarms,
    assert_idle,
    raising_once,
)
from loops import GREEDY, prompt
from waiting import until

from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.request import Request
from edgellm.llm import LLM, load


@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_call(tiny: LLM) -> None:
    answers_interrupted(tiny, times=50)


@pytest.mark.usefixtures("alarm")
def test_a_change_that_an_interrupt_kept_from_beginning_is_not_made(tiny: LLM) -> None:
    with tiny.session() as session:
        session.append(prompt(1, 40))
        with paused(tiny), pytest.raises(AlarmError), alarm_after(0.05):
            session.append(prompt(2, 40))
        assert session.tokens == tuple(prompt(1, 40))
        assert len(session.generate(max_tokens=3, **GREEDY).tokens) == 3


def test_an_exception_of_any_kind_is_that_of_the_answer_whose_callback_raised_it(tiny: LLM) -> None:
    expected = tiny.generate(prompt(2, 50), max_tokens=30, **GREEDY).tokens
    with tiny.session() as session:
        session.append(prompt(1, 40))
        broken = session.stream(logit_filter=raising_once(AlarmError(), at=3), **GREEDY)
        next(broken)
        assert tiny.generate(prompt(2, 50), max_tokens=30, **GREEDY).tokens == expected
        with pytest.raises(AlarmError):
            list(broken)
        assert len(session.generate(max_tokens=5, ignore_eos=True).tokens) == 5
    del broken
    assert_idle(tiny)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_exception_where_answers_to_one_prompt_part(tiny: LLM, at: int) -> None:
    """All but the one whose piece it was begin all the same."""
    options = tiny.generation_options(seed=1, max_tokens=4, ignore_eos=True)
    filtered, requests = raising_once(AlarmError(), at=at), []
    for _ in range(3):
        context = Context(tiny.engine)
        context.append("prompt", prompt(1, 300), parse_special=False)
        requests.append(Request(context, Call(options=options, logit_filter=filtered), closes=True))
    requests[0].forks = requests[1:]
    tiny.engine.loop.submit(requests[0])
    until(lambda: all(request.finished for request in requests))
    broken = [request for request in requests if request.error is not None]
    assert [type(request.error) for request in broken] == [AlarmError]
    tokens = [[p.token for p in r.pieces] for r in requests if r.error is None]
    assert tokens[0] == tokens[1]
    fresh = load(str(tiny.engine.bundle.path))
    expected = fresh.generate(prompt(1, 300), seed=1, max_tokens=4, ignore_eos=True)
    assert tokens[0] == [*expected.tokens, None]
    del context, broken
    requests.clear()
    assert_idle(tiny)


def test_a_step_that_breaks_ends_all_answers_with_its_error(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers on their way and answers to one prompt; the next ones are as usual."""

    def breaking(request: Request) -> None:
        monkeypatch.undo()
        raise AlarmError

    expected = tiny.generate(prompt(2, 20), max_tokens=30, **GREEDY).tokens
    with tiny.session() as session:
        session.append(prompt(1, 40))
        stream = session.stream(max_tokens=1000, **GREEDY)
        next(stream)
        watch_leaving(tiny, monkeypatch, breaking)
        with pytest.raises(AlarmError):
            tiny.generate(prompt(2, 20), n=2, max_tokens=30, **GREEDY)
        with pytest.raises(AlarmError):
            list(stream)
        assert session.generate(max_tokens=2, **GREEDY).tokens
    del stream
    assert_idle(tiny)
    assert tiny.generate(prompt(2, 20), max_tokens=30, **GREEDY).tokens == expected


@pytest.mark.slow
@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 3))))
def test_alarms_at_random(tiny: LLM, seed: int) -> None:
    answers_with_alarms(tiny, alarms=150, seed=seed)
