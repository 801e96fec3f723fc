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
from lane_checks import PROMPTS, SHORT, Gate, alone, assert_ended, start, together, tokens_of
from loop_checks import GREEDY, AlarmError, forked, interrupted_answers, prompt, until

from edgellm import OptionError
from edgellm.backends.batch import Rows, Span
from edgellm.engine.context import Context
from edgellm.engine.request import Request
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM


@pytest.mark.parametrize("raised", [ValueError("the provider says no"), SystemExit(3)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_thread_is_that_of_its_own_prompt(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    expected, fresh = tokens_of(alone(tiny)), start(tiny.engine.bundle.path)
    run, end = fresh.engine.prefill.run, PROMPTS[4][-5:]

    def picky(spans: Sequence[Span], **options: Any) -> list[Rows]:
        if any(list(span.tokens[-5:]) == end for span in spans):
            raise raised
        return run(spans, **options)

    monkeypatch.setattr(fresh.engine.prefill, "run", picky)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(fresh.generate, each, **SHORT) for each in PROMPTS]
        with pytest.raises(Exception, match=r"says no|was stopped"):
            answers[4].result(timeout=30)
        found = [a.result(timeout=30).tokens for i, a in enumerate(answers) if i != 4]
    assert found == expected[:4] + expected[5:]
    assert fresh.generate(PROMPTS[3], **SHORT).tokens == expected[3]
    assert_ended(fresh)


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
def test_a_prompt_that_is_stopped_ends_between_two_layers(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate, cancel = Gate(tiny, monkeypatch), threading.Event()
    limit = 300 if how == "out of time" else None
    with ThreadPoolExecutor(1) as pool:
        options = {**SHORT, "time_limit_ms": limit}
        answer = pool.submit(tiny.generate, PROMPTS[2], cancel=cancel, **options)
        assert gate.reached.wait(30)
        if how == "cancelled":
            cancel.set()
        until(lambda: gate.stopped)
        gate.opened.set()
        expected = "time" if how == "out of time" else "cancelled"
        assert answer.result(timeout=30).finish_reason == expected


def test_a_prompt_that_is_withdrawn_gives_its_blocks_back(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody steps any more."""
    gate, context = Gate(tiny, monkeypatch), Context(tiny.engine)
    context.append("prompt", PROMPTS[2], parse_special=False)
    request = Request(context, tiny.generation_options(max_tokens=4), closes=True)
    tiny.engine.loop.submit(request)
    tiny.engine.loop.advance([request])
    assert gate.reached.wait(30)
    assert tiny.engine.cache.used_blocks == 1  # of the first chunk
    tiny.engine.loop.withdraw(request)
    until(lambda: gate.stopped)
    gate.opened.set()
    until(lambda: tiny.engine.cache.used_blocks == 0)


def test_a_session_that_is_closed_meanwhile(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, session = Gate(tiny, monkeypatch), tiny.session()
    session.append(PROMPTS[2])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(session.generate, **SHORT)
        assert gate.reached.wait(30)
        session.close()
        gate.opened.set()
        with pytest.raises(OptionError, match="was changed"):
            answer.result(timeout=30)
    assert session.tokens == ()
    del answer


def test_cancelled_at_random(tiny: LLM) -> None:
    """While waiting, on the provider, in decode: blocks are back, and nobody else notices."""
    rng, expected = random.Random(3), tokens_of(alone(tiny))

    def cancelled(i: int) -> None:
        cancel = threading.Event()
        timer = threading.Timer(rng.random() * 0.03, cancel.set)
        timer.start()
        tokens = prompt(1000 + i, rng.randint(2, 400))
        answer = tiny.generate(tokens, cancel=cancel, max_tokens=60, ignore_eos=True)
        assert answer.finish_reason in ("cancelled", "length")
        timer.join()

    def closed(i: int) -> None:
        stream = tiny.stream(prompt(5000 + i, rng.randint(2, 400)), **GREEDY)
        for _ in range(rng.randrange(3)):
            next(stream)
        stream.close()

    with ThreadPoolExecutor(12) as pool:
        cancels = [pool.submit((cancelled, closed)[i % 2], i) for i in range(160)]
        found = tokens_of(alone(tiny))
        for each in cancels:
            each.result(timeout=120)
    assert found == expected


def test_preempted_as_alone(bundle_path: Path) -> None:
    """More than fits: places are given up also while rows are on their way, and nobody notices."""
    growing = [prompt(i, 100 + 20 * i) for i in range(7)]
    expected = tokens_of(alone(start(bundle_path), growing, max_tokens=200))
    # prompts do not wait for decode, so that several are there at once
    small, preempted = start(bundle_path, cache_size=5 * BLOCK, decode_slowdown=100.0), 0
    for _ in range(5):  # whether two are there at once is a matter of time
        answers = together(small, growing, max_tokens=200)
        assert tokens_of(answers) == expected
        preempted += sum(answer.stats.preempted for answer in answers)
        if preempted:
            break
    assert preempted
    assert_ended(small)


def test_a_full_context_goes_on(bundle_path: Path) -> None:
    shifting = {"max_tokens": 150, "context_policy": "shift", "keep": 9}
    prompts = [prompt(i, 90 + 60 * i) for i in range(4)]
    options = {"ctx_size": 2 * BLOCK}
    expected = tokens_of(alone(start(bundle_path, **options), prompts, **shifting))
    small = start(bundle_path, cache_size=6 * BLOCK, **options)
    assert tokens_of(together(small, prompts, **shifting)) == expected
    assert_ended(small)


@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 1))))
def test_alarms_at_random(tiny: LLM, seed: int) -> None:
    assert interrupted_answers(tiny, seconds=3, seed=seed) > 20


def test_an_interrupt_before_the_thread_began(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever steps next begins it."""
    expected = tiny.generate(PROMPTS[2], **SHORT).tokens
    fresh = start(tiny.engine.bundle.path)
    lane = fresh.engine.loop._batcher._lane  # type: ignore[attr-defined]
    launch = lane.launch

    def interrupted() -> None:
        monkeypatch.setattr(lane, "launch", launch)
        raise AlarmError

    monkeypatch.setattr(lane, "launch", interrupted)
    with pytest.raises(AlarmError):
        fresh.generate(PROMPTS[4], **SHORT)
    assert fresh.generate(PROMPTS[2], **SHORT).tokens == expected
    assert_ended(fresh)


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

    gate = Gate(tiny, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tiny.generate, PROMPTS[2], **SHORT)
        assert gate.reached.wait(30)
        until(lambda: tiny.engine.loop._batcher.resting)
        with tiny.engine.lock:  # whoever began the prompt has done with its step
            pass
        assert "forked while another thread computed a prompt" in forked(in_child)
        gate.opened.set()
        assert len(answer.result(timeout=30).tokens) == 12


def test_an_interrupt_while_a_thread_starts_is_itself(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Thread.start` may make an error of a lock of it; the thread runs, and keeps its blocks."""
    expected, began = alone(tiny, PROMPTS[4:5])[0].tokens, list[str]()
    start_whole = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start_whole(thread)
        began.append(thread.name)
        if began == ["edgellm-prefill"]:
            try:
                raise AlarmError
            except AlarmError:
                raise RuntimeError("release unlocked lock")  # noqa: B904

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(AlarmError):
        tiny.generate(prompt(77, 300), **SHORT)
    assert tiny.generate(PROMPTS[4], **SHORT).tokens == expected
