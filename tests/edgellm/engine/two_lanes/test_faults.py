"""What goes wrong in one of two lanes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inspection import is_resting, results, used_blocks
from lane_checks import PROMPTS, assert_ended, start, wait_for_lane
from loop_checks import (
    answers_interrupted,
    answers_with_alarms,
    cancel_after,
    cancelled_at_steps,
    forked,
)
from loops import (
    GREEDY,
    SHORT,
    Gate,
    alone,
    assert_same,
    begin_together,
    prompt,
    short,
    together,
    tokens_of,
)
from waiting import Clock, until

from edgellm import OptionError
from edgellm.backends.batch import Rows, Span
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.request import Request
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM


@pytest.mark.parametrize("raised", [ValueError("the provider says no"), SystemExit(3)])
def test_an_error_in_the_thread_is_that_of_its_own_prompt(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    expected, fresh = tokens_of(alone(tiny, short(PROMPTS))), start(tiny.engine.bundle.path)
    run, end = fresh.engine.prefill.run, PROMPTS[4][-5:]

    def picky(spans: Sequence[Span], **options: Any) -> list[Rows]:
        if any(list(span.tokens[-5:]) == end for span in spans):
            raise raised
        return run(spans, **options)

    monkeypatch.setattr(fresh.engine.prefill, "run", picky)
    with ThreadPoolExecutor(8) as pool:
        answers = begin_together(pool, fresh, short(PROMPTS))
        with pytest.raises(type(raised)):
            answers.pop(4).result()
        found = tokens_of(results(answers))
    assert found == expected[:4] + expected[5:]
    assert fresh.generate(PROMPTS[3], **SHORT).tokens == expected[3]
    assert_ended(fresh)


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
def test_a_prompt_that_is_stopped_ends_between_two_layers(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate, cancel = Gate(tiny.engine.prefill, "run", monkeypatch), threading.Event()
    limit, clock = 300 if how == "out of time" else None, Clock()
    for module in ("request", "answer"):
        monkeypatch.setattr(f"edgellm.engine.{module}.time", clock)
    with ThreadPoolExecutor(1) as pool:
        options = {**SHORT, "time_limit_ms": limit}
        answer = pool.submit(tiny.generate, PROMPTS[2], cancel=cancel, **options)
        until(gate.reached.is_set)
        if how == "cancelled":
            cancel.set()
        else:
            clock.advance(0.3)
        until(lambda: gate.stopped)
        gate.opened.set()
        expected = "time" if how == "out of time" else "cancelled"
        assert answer.result().finish_reason == expected


def test_a_prompt_that_is_withdrawn_gives_its_blocks_back(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, context = Gate(tiny.engine.prefill, "run", monkeypatch), Context(tiny.engine)
    context.append("prompt", PROMPTS[2], parse_special=False)
    request = Request(context, Call(options=tiny.generation_options(max_tokens=4)), closes=True)
    tiny.engine.loop.submit(request)
    until(gate.reached.is_set)
    assert used_blocks(tiny) == 1  # of the first chunk
    tiny.engine.loop.withdraw(request)
    until(lambda: gate.stopped)
    gate.opened.set()
    until(lambda: used_blocks(tiny) == 0)


def test_a_session_that_is_closed_meanwhile(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, session = Gate(tiny.engine.prefill, "run", monkeypatch), tiny.session()
    session.append(PROMPTS[2])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(session.generate, **SHORT)
        until(gate.reached.is_set)
        session.close()
        gate.opened.set()
        with pytest.raises(OptionError, match="was changed"):
            answer.result()
    assert session.tokens == ()
    del answer


def test_cancelled_at_any_step(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While waiting, on the provider, in decode: blocks are back, and the others do not notice."""
    calls, steps = short(PROMPTS), (0, 1, 2, 3, 5, 8, 10, 11)
    expected = alone(tiny, calls)
    streams = [tiny.stream(prompt(5000 + i, 100 * i), **GREEDY) for i in (1, 2, 3)]
    for taken, stream in enumerate(streams):
        for _ in range(taken):
            next(stream)
        stream.close()
    assert_same(cancelled_at_steps(tiny, monkeypatch, calls, at=steps), expected)


@pytest.mark.slow
def test_cancelled_at_random(tiny: LLM) -> None:
    rng, expected = random.Random(3), tokens_of(alone(tiny, short(PROMPTS)))

    def cancelled(i: int) -> None:
        cancel_after(tiny, rng, i, prompt_at_most=400)

    def closed(i: int) -> None:
        stream = tiny.stream(prompt(5000 + i, rng.randint(2, 400)), **GREEDY)
        for _ in range(rng.randrange(3)):
            next(stream)
        stream.close()

    with ThreadPoolExecutor(12) as pool:
        cancels = [pool.submit((cancelled, closed)[i % 2], i) for i in range(160)]
        found = tokens_of(alone(tiny, short(PROMPTS)))
        results(cancels)
    assert found == expected


@pytest.mark.slow
def test_preempted_as_alone(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than fits: places are given up also while rows are on their way, and nobody notices."""
    growing = short((prompt(i, 100 + 20 * i) for i in range(7)), max_tokens=140)
    expected = alone(start(bundle_path), growing)
    # prompts do not wait for decode, so that several are there at once
    small = start(bundle_path, cache_size=5 * BLOCK, decode_slowdown=100.0)
    wait_for_lane(small, monkeypatch)
    answers = together(small, growing)
    assert_same(answers, expected)
    assert sum(answer.stats.preempted for answer in answers)
    assert_ended(small)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [6, 3])
def test_a_full_context_goes_on(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """Also where one that shifts its context first has to take the blocks of another one."""
    shifting = {"max_tokens": 100, "context_policy": "shift", "keep": 9}
    calls = short((prompt(i, 90 + 60 * i) for i in range(4)), **shifting)
    options = {"ctx_size": 2 * BLOCK}
    expected = alone(start(bundle_path, **options), calls)
    small = start(bundle_path, cache_size=blocks * BLOCK, decode_slowdown=100.0, **options)
    wait_for_lane(small, monkeypatch)
    assert_same(together(small, calls), expected)
    assert_ended(small)


@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_call(tiny: LLM) -> None:
    answers_interrupted(tiny, times=33)


@pytest.mark.slow
@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 1))))
def test_alarms_at_random(tiny: LLM, seed: int) -> None:
    answers_with_alarms(tiny, alarms=60, seed=seed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_in_the_middle_of_a_prompt_refuses(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_child() -> str:
        try:
            return str(tiny.generate(PROMPTS[0], **SHORT).tokens)
        except OptionError as error:
            return str(error)

    gate = Gate(tiny.engine.prefill, "run", monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tiny.generate, PROMPTS[2], **SHORT)
        until(gate.reached.is_set)
        until(lambda: is_resting(tiny))
        assert "forked while the model computed" in forked(in_child)
        gate.opened.set()
        assert len(answer.result().tokens) == 12
