"""Prompts whose rows rest between two layers: the same answers, whatever happens meanwhile."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from inspection import (
    cached_prefix,
    context,
    live,
    policy,
    results,
    set_costs,
    step_in_readers,
    submitted,
    watch_leaving,
)
from layered_checks import (
    LAYERS,
    LENGTHS,
    PROMPTS,
    STREAM,
    Groups,
    in_company,
    start_layered,
)
from loop_checks import (
    AlarmError,
    answers_interrupted,
    answers_with_alarms,
    assert_idle,
    cancel_after,
    cancelled_at_steps,
    check_pools,
    poison_given_back,
)
from loops import (
    GREEDY,
    SHORT,
    alone,
    assert_same,
    begin_together,
    prompt,
    short,
    together,
    tokens_of,
)
from waiting import until

from edgellm import CacheFullError, Completion, OptionError
from edgellm.backends import selection
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.prefill_job import Layered
from edgellm.engine.request import Request
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(library() is None, reason="needs the native kernels")

NATIVE: dict[str, Any] = {"prefill": "native", "decode": "native", "ctx_size": 1024}


@pytest.fixture(scope="module")
def folder(deep_model: Path) -> str:
    return str(load(str(deep_model)).engine.bundle.path)


@pytest.fixture(scope="module")
def windowed_folder(windowed_deep_model: Path) -> str:
    return str(load(str(windowed_deep_model)).engine.bundle.path)


def start(folder: str, **options: Any) -> LLM:
    return start_layered(folder, **{**NATIVE, **options})


@pytest.fixture
def tiny(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """No stream runs ahead, so that it decodes as long as a prompt beside it is computed."""
    llm = start(folder)
    step_in_readers(llm, monkeypatch)
    yield llm
    assert_idle(llm)


@pytest.fixture(scope="module")
def expected(folder: str) -> list[Completion]:
    serial = load(folder, scheduling="serial", cache_size=64 * BLOCK, **NATIVE)
    return alone(serial, short(PROMPTS, logprobs=3))


@pytest.fixture
def groups(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tiny, monkeypatch)


# What is computed.


def test_the_bits_are_those_of_one_after_the_other(
    tiny: LLM, groups: Groups, expected: list[Completion]
) -> None:
    """Whoever else is there, and whether rows rest or not."""
    assert_same(together(tiny, short(PROMPTS, logprobs=3)), expected)
    assert len(groups.layers) > 2 * len(PROMPTS)
    assert sum(layers.stop == LAYERS for layers in groups.layers) > 3
    assert max(len(layers) for layers in groups.layers) < LAYERS
    assert tiny.engine.loop.counts.prefill_rows >= sum(LENGTHS)
    fresh = start(str(tiny.engine.bundle.path))
    assert_same(alone(fresh, short(PROMPTS, logprobs=3)), expected)


def test_windows_are_passed_while_rows_rest(windowed_folder: str) -> None:
    """Three layers of six see 100 tokens; their blocks are given back when rows have landed."""
    serial = load(windowed_folder, scheduling="serial", cache_size=64 * BLOCK, **NATIVE)
    wanted = alone(serial, short(PROMPTS, logprobs=3))
    llm = start(windowed_folder)
    with pytest.MonkeyPatch.context() as patch:
        groups = Groups(llm, patch)
        assert_same(together(llm, short(PROMPTS, logprobs=3)), wanted)
        assert_same(
            [in_company(llm, PROMPTS[9][::-1])], [serial.generate(PROMPTS[9][::-1], **SHORT)]
        )
    assert sum(layers.stop == LAYERS for layers in groups.layers) > 3
    assert max(len(layers) for layers in groups.layers) < LAYERS
    assert_idle(llm)


def test_what_is_told_of_a_prompt(tiny: LLM, expected: list[Completion]) -> None:
    reports: list[tuple[int, int]] = []
    stream = tiny.stream(prompt(77, 30), **STREAM)
    next(stream)
    found = tiny.generate(PROMPTS[9], progress=lambda p: reports.append((p.done, p.total)), **SHORT)
    stream.close()
    assert found.tokens == expected[9].tokens
    assert found.stats.prefill == {"native": 999}
    assert found.stats.scheduling == "layered"
    assert found.stats.prompt_tokens_per_second > 0
    done = [each for each, _ in reports]
    assert done == sorted(done)
    assert reports[-1] == (999, 999)
    assert 2 <= len(reports) <= 5


def test_answers_to_one_prompt(tiny: LLM, groups: Groups) -> None:
    options = {**SHORT, "temperature": 1}
    fresh = start(str(tiny.engine.bundle.path))
    expected = [fresh.generate(PROMPTS[5], seed=i, **options).tokens for i in range(3)]
    stream = tiny.stream(PROMPTS[3], **STREAM)
    next(stream)
    found = tiny.generate(PROMPTS[5], n=3, seed=0, **options)
    stream.close()
    assert groups.layers
    assert [answer.tokens for answer in found] == expected
    assert [answer.stats.cached_tokens for answer in found] == [0, 700, 700]


def test_a_short_prompt_passes_one_that_rests(
    tiny: LLM, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    watch_leaving(tiny, monkeypatch, lambda each: ended.append(each.stats().prompt_tokens))
    arrived = threading.Event()

    def wait(number: int) -> None:
        if number == 1:
            arrived.set()
            until(lambda: len(live(tiny)) + len(submitted(tiny)) == 3)

    groups.before = wait
    once = {**GREEDY, "max_tokens": 1}
    with ThreadPoolExecutor(3) as pool:
        stream = tiny.stream(PROMPTS[3], **STREAM)
        next(stream)
        long = pool.submit(tiny.generate, PROMPTS[9], **once)
        until(arrived.is_set)
        reading = pool.submit(lambda: list(stream))
        short_one = pool.submit(tiny.generate, PROMPTS[0], **once)
        results([long, short_one, reading])
    assert list(dict.fromkeys(ended)) == [len(PROMPTS[i]) for i in (0, 9, 3)]


# What comes between two groups.


def test_a_prompt_that_fills_the_cache(folder: str) -> None:
    """Rows that rest behind a part of a block need a copy of it, for which there is no room."""
    filling = prompt(90, 8 * BLOCK - 13)
    serial = load(folder, scheduling="serial", cache_size=64 * BLOCK, **NATIVE)
    llm = start(folder, cache_size=8 * BLOCK)  # and a block, which the session holds
    with llm.session() as session:
        session.append(prompt(92, 100))
        session.generate(max_tokens=1)
        calls = short([filling, prompt(91, 300)])
        assert_same(together(llm, calls), alone(serial, calls))
    assert_idle(llm)


@pytest.mark.parametrize("at", [1, 8])
def test_preempted_between_two_groups(
    tiny: LLM, groups: Groups, expected: list[Completion], at: int
) -> None:
    """It begins again behind what was computed before, and finds that in the cache."""

    def full(number: int) -> None:
        if number == at:
            raise CacheFullError("no room")

    groups.before = full
    found = in_company(tiny, PROMPTS[9], logprobs=3)
    assert_same([found], expected[9:])
    assert found.stats.preempted == 1
    firsts = [layers.start for layers in groups.layers]
    ends = [layers.stop for layers in groups.layers]
    assert firsts[at] == 0
    assert firsts.count(0) == ends.count(LAYERS) + (ends[at - 1] < LAYERS)
    assert groups.passed == 999


def test_too_little_room(folder: str) -> None:
    """Blocks that were given back, or not yet written to, hold NaN; others get them meanwhile."""
    options: dict[str, Any] = {"kv_format": "f32", "ctx_size": 5 * BLOCK}
    calls = short((prompt(i, 100 + 40 * i) for i in range(6)), max_tokens=90)
    serial = load(folder, scheduling="serial", cache_size=64 * BLOCK, **{**NATIVE, **options})
    wanted = alone(serial, calls)
    small = start(folder, cache_size=8 * BLOCK, **options)
    for group in small.engine.cache.groups:
        poison_given_back(group)
    found = together(small, calls)
    assert_same(found, wanted)
    assert sum(each.stats.preempted for each in found)
    assert_idle(small)


def test_a_full_context_goes_on(folder: str) -> None:
    shifting = {"max_tokens": 90, "context_policy": "shift", "keep": 9}
    calls = short((prompt(i, 90 + 110 * i) for i in range(5)), **shifting)
    options: dict[str, Any] = {"ctx_size": 4 * BLOCK}
    serial = load(folder, scheduling="serial", **{**NATIVE, **options})
    wanted = alone(serial, calls)
    small = start(folder, cache_size=6 * BLOCK, **options)
    found = together(small, calls)
    assert_same(found, wanted)
    assert any(each.stats.dropped_tokens for each in found)
    assert_idle(small)


@pytest.mark.parametrize(
    ("how", "at"), [("cancelled", 1), ("cancelled", 7), ("closed", 2), ("withdrawn", 7)]
)
def test_nobody_wants_the_rest(tiny: LLM, groups: Groups, at: int, how: str) -> None:
    """Its blocks are back with the next step, and the rows that rested are found by nobody."""
    cancel, session = threading.Event(), tiny.session()
    session.append(PROMPTS[9])
    own = Context(tiny.engine)
    own.append("prompt", PROMPTS[9], parse_special=False)
    request = Request(own, Call(options=tiny.generation_options(max_tokens=4)), closes=True)
    stops: dict[str, Callable[[], object]] = {
        "cancelled": cancel.set,
        "closed": session.close,
        "withdrawn": partial(tiny.engine.loop.withdraw, request),
    }
    groups.before = lambda number: stops[how]() if number == at else None
    stream = tiny.stream(PROMPTS[3], **STREAM)
    next(stream)
    if how == "withdrawn":
        tiny.engine.loop.submit(request)
        for _ in range(20):
            next(stream)
    elif how == "closed":
        with pytest.raises(OptionError, match="was changed"):
            session.generate(**SHORT)
    else:
        assert session.generate(cancel=cancel, **SHORT).finish_reason == "cancelled"
    assert len(groups.layers) == at
    session.close()
    assert (groups.passed > 0) == (at == 7)
    assert cached_prefix(tiny, PROMPTS[9]) == groups.passed
    stream.close()


def test_a_session_that_goes_back_between_two_groups(tiny: LLM, groups: Groups) -> None:
    with tiny.session() as session:
        session.append(PROMPTS[9])
        request = Request(context(session), Call(options=tiny.generation_options(**SHORT)))
        stream = tiny.stream(PROMPTS[3], **STREAM)
        next(stream)
        tiny.engine.loop.submit(request)
        while len(groups.layers) < 9:
            next(stream)
        session.rewind(300)
        next(stream)
        assert isinstance(request.error, OptionError)
        assert "was changed" in str(request.error)
        assert len(groups.layers) == 9
        stream.close()
        assert session.tokens == tuple(PROMPTS[9][:300])
        fresh = start(str(tiny.engine.bundle.path)).generate(PROMPTS[9][:300], **SHORT)
        assert session.generate(**SHORT).tokens == fresh.tokens


def test_one_that_fails_fails_alone(tiny: LLM, groups: Groups, expected: list[Completion]) -> None:
    def broken(number: int) -> None:
        if number == 4:
            raise ValueError("a kernel says no")

    groups.before = broken
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = begin_together(pool, tiny, short(PROMPTS))
        errors = [answer.exception() for answer in answers]
    assert [str(error) for error in errors if error is not None] == ["a kernel says no"]
    found = [a.result().tokens for a, error in zip(answers, errors, strict=True) if error is None]
    wanted = [e.tokens for e, error in zip(expected, errors, strict=True) if error is None]
    assert found == wanted


@pytest.mark.parametrize("at", [1, 6])
def test_a_step_that_breaks_between_two_groups(
    tiny: LLM, groups: Groups, expected: list[Completion], at: int
) -> None:
    """All answers end, and leave nothing behind."""

    def alarm(number: int) -> None:
        if number == at:
            raise AlarmError

    groups.before = alarm
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = begin_together(pool, tiny, short(PROMPTS))
        assert all(isinstance(answer.exception(), AlarmError) for answer in answers)
        assert check_pools(tiny) == 0
        found = results(begin_together(pool, tiny, short(PROMPTS)))
    assert tokens_of(found) == tokens_of(expected)


def test_cancelled_at_any_step(
    tiny: LLM, expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While waiting, between two groups, in decode; the others do not notice."""
    calls, steps = short(PROMPTS, logprobs=3), (0, 1, 2, 3, 5, 8, 13, 21, 34)
    assert_same(cancelled_at_steps(tiny, monkeypatch, calls, at=steps), expected)


@pytest.mark.slow
def test_cancelled_at_random(tiny: LLM, expected: list[Completion]) -> None:
    rng = random.Random(3)

    with ThreadPoolExecutor(12) as pool:
        cancels = [pool.submit(cancel_after, tiny, rng, i) for i in range(80)]
        found = [tiny.generate(each, logprobs=3, **SHORT) for each in PROMPTS]
        results(cancels)
    assert_same(found, expected)


@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_call(folder: str) -> None:
    llm = start(folder, ctx_size=4 * BLOCK, cache_size=16 * BLOCK)
    set_costs(llm, 4e-3)
    answers_interrupted(llm, times=30)


@pytest.mark.slow
@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 1))))
def test_alarms_at_random(folder: str, seed: int) -> None:
    llm = start(folder, ctx_size=4 * BLOCK, cache_size=16 * BLOCK)
    set_costs(llm, 4e-3)
    answers_with_alarms(llm, alarms=60, seed=seed)


# What is refused.


def test_the_policy_has_the_layers_of_the_model(folder: str) -> None:
    chosen = policy(start(folder, time_target_ms=20))
    assert isinstance(chosen, Layered)
    assert (chosen.layers, chosen.time_target) == (LAYERS, pytest.approx(0.02))


@pytest.mark.parametrize(
    "options",
    [
        {"prefill": "triton", "decode": "triton"},
        {"prefill": "cuda", "decode": "native"},
        {"prefill": "cpu", "decode": "triton"},
    ],
)
def test_gpus_are_refused(
    folder: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is one."""
    monkeypatch.setattr(selection, "require_backend", Mock())
    with pytest.raises(OptionError, match=r"on a GPU; take native or .* or `scheduling` stall"):
        load(folder, scheduling="layered", **options)
