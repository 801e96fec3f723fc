"""Prompts on the CPU provider, which plays an accelerator, while native kernels decode."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_checks import (
    GREEDY,
    AlarmError,
    assert_idle,
    forked,
    interrupted_answers,
    poison_given_back,
    prompt,
    until,
)

from edgellm import Completion, OptionError
from edgellm.backends.batch import Rows, Span
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import Costs
from edgellm.engine.context import Context
from edgellm.engine.embedding import embeddings
from edgellm.engine.request import Request
from edgellm.engine.two_lanes import TwoLaneBatcher
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(library() is None, reason="decode is native: needs a compiler")

LENGTHS = (5, 9, 300, 30, 411, 17, 128, 260)
PROMPTS = [prompt(i, length) for i, length in enumerate(LENGTHS)]
# On all cores but one, which is the host's.
PLAYED: dict[str, Any] = {"prefill": "cpu", "decode": "native", "schedule": "in-order"}
SHORT: dict[str, Any] = {**GREEDY, "max_tokens": 12}


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    precisions = ("f32", "int4", "packed", "w8a8", "w8a16-qdq")
    return export_static(tmp_path_factory.mktemp("lanes") / "bundle", precisions=precisions)


def start(path: Path, **options: Any) -> LLM:
    """Chunks cost what they cost on a quiet machine, and a job is of one."""
    chosen = {"scheduling": "two_devices", "precision": "f32", "ctx_size": 4 * BLOCK, **options}
    llm = load(str(path), **{**PLAYED, "cache_size": 32 * BLOCK, **chosen})
    assert isinstance(llm.engine.prefill, ChunkedBackend)
    llm.engine.prefill.costs = Costs({32: 1.0, 128: 3.0})
    return llm


@pytest.fixture
def tiny(bundle_path: Path) -> Iterator[LLM]:
    llm = start(bundle_path)
    threads = threading.active_count()
    yield llm
    assert_ended(llm)
    assert threading.active_count() == threads


def assert_ended(llm: LLM) -> None:
    """Nothing is left, once the last job has seen that nobody wants it."""
    batcher = llm.engine.loop._batcher
    assert isinstance(batcher, TwoLaneBatcher)
    until(lambda: not any(t.name == "edgellm-prefill" for t in threading.enumerate()))
    assert_idle(llm)
    assert batcher._lane._job is None


def alone(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[Completion]:
    return [llm.generate(tokens, **{**SHORT, **options}) for tokens in prompts]


def together(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[Completion]:
    """Each in a thread of its own."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(llm.generate, each, **{**SHORT, **options}) for each in prompts]
        return [answer.result(timeout=60) for answer in answers]


def tokens_of(answers: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


class Gate:
    """Holds prompts up in the middle of the provider's chunks.

    Attributes:
        reached: a prompt is there.
        opened: it may go on.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.stopped = False
        backend = llm.engine.prefill
        run = backend.run

        def held(spans: Sequence[Span], *, should_stop: Callable[[], bool]) -> list[Rows]:
            self.reached.set()
            ends = time.monotonic() + 30
            while not self.opened.is_set() and time.monotonic() < ends:
                self.stopped = self.stopped or should_stop()
                time.sleep(0.001)
            return run(spans, should_stop=should_stop)

        monkeypatch.setattr(backend, "run", held)


# What is computed.


@pytest.mark.parametrize("precision", ["f32", "w8a8", "w8a16-qdq"])
@pytest.mark.parametrize("schedule", ["in-order", "out-of-order"])
def test_the_bits_are_those_of_one_after_the_other(
    bundle_path: Path, precision: str, schedule: str
) -> None:
    """Whoever else is there. Of some precisions the first token of a prompt is the host's."""
    options = {"precision": precision, "schedule": schedule}
    before = start(bundle_path, scheduling="serial", **options)
    expected = [before.generate(each, logprobs=3, **SHORT) for each in PROMPTS]
    llm = start(bundle_path, **options)
    for found in (together(llm, logprobs=3), alone(start(bundle_path, **options), logprobs=3)):
        assert tokens_of(found) == tokens_of(expected)
        assert [each.logprobs for each in found] == [each.logprobs for each in expected]
    assert_ended(llm)


def test_every_prompt_goes_to_the_provider_whatever_its_length(tiny: LLM) -> None:
    for found in (alone(tiny), together(tiny, [prompt(50 + i, n) for i, n in enumerate(LENGTHS)])):
        stats = [answer.stats for answer in found]
        left = [n - each.cached_tokens for n, each in zip(LENGTHS, stats, strict=True)]
        assert [each.prefill for each in stats] == [{"cpu": count} for count in left]
        assert sum(left) > sum(LENGTHS) - 20
        assert {answer.stats.scheduling for answer in found} == {"two_devices"}
        assert {answer.stats.decode for answer in found} == {"native packed"}


def test_answers_to_one_prompt_and_cached_prompts(tiny: LLM) -> None:
    expected = [tiny.generate(PROMPTS[4], seed=i, **{**SHORT, "temperature": 1}) for i in range(3)]
    assert [answer.stats.cached_tokens for answer in expected] == [0, 410, 410]
    fresh = start(tiny.engine.bundle.path)
    found = fresh.generate(PROMPTS[4], n=3, seed=0, **{**SHORT, "temperature": 1})
    assert tokens_of(found) == tokens_of(expected)
    assert_ended(fresh)


def test_with_asyncio(tiny: LLM) -> None:
    expected = tokens_of(alone(tiny))

    async def answers() -> list[Completion]:
        return await asyncio.gather(*(tiny.agenerate(each, **SHORT) for each in PROMPTS))

    assert tokens_of(asyncio.run(answers())) == expected


def test_embeddings_come_between(tiny: LLM) -> None:
    def embed(llm: LLM) -> list[Any]:
        return list(llm.engine.loop.drive(embeddings(llm.engine, PROMPTS, pooling="mean")))

    expected, fresh = embed(tiny), start(tiny.engine.bundle.path)
    with ThreadPoolExecutor(2) as pool:
        answers = pool.submit(together, fresh)
        found = embed(fresh)
        assert tokens_of(answers.result(timeout=60)) == tokens_of(alone(tiny))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert_ended(fresh)


def test_blocks_are_its_own_until_the_thread_is_done(bundle_path: Path) -> None:
    """Blocks that were given back, or not yet written to, hold NaN."""
    llm = start(bundle_path, cache_size=8 * BLOCK, kv_format="f32")
    expected = tokens_of(alone(start(bundle_path, kv_format="f32"), max_tokens=90))
    for group in llm.engine.cache.groups:
        poison_given_back(group)
    rng = random.Random(1)
    for _ in range(4):
        cancels = [threading.Event() for _ in range(4)]
        timers = [threading.Timer(rng.uniform(0, 0.05), cancel.set) for cancel in cancels]
        for timer in timers:
            timer.start()
        with ThreadPoolExecutor(12) as pool:
            others = [
                pool.submit(llm.generate, prompt(rng.randrange(10**6), 400), cancel=c, **GREEDY)
                for c in cancels
            ]
            answers = [pool.submit(llm.generate, p, **{**SHORT, "max_tokens": 90}) for p in PROMPTS]
            assert [answer.result(timeout=60).tokens for answer in answers] == expected
            for cancel in cancels:
                cancel.set()
            for other in others:
                other.result(timeout=60)
    assert_ended(llm)


# At the same time.


def test_streams_go_on_while_a_prompt_is_computed(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiny.generate(PROMPTS[1], temperature=0, ignore_eos=True, max_tokens=100).tokens
    stream = tiny.stream(PROMPTS[1], temperature=0, ignore_eos=True, max_tokens=100)
    read = [next(stream).token for _ in range(20)]
    gate = Gate(tiny, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tiny.generate, PROMPTS[2], **SHORT)
        until(lambda: gate.reached.is_set() or read.append(next(stream).token) is not None)
        assert gate.reached.is_set()
        read += [piece.token for piece in stream if piece.token is not None]
        assert not answer.done()
        gate.opened.set()
        assert len(answer.result(timeout=30).tokens) == 12
    assert tuple(read) == expected


def test_nobody_computes_while_all_wait_for_the_provider(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, steps = Gate(tiny, monkeypatch), tiny.engine.loop.counts
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(tiny.generate, each, **SHORT) for each in PROMPTS[:4]]
        assert gate.reached.wait(30)
        time.sleep(0.1)  # for the others to come
        before = steps.steps
        time.sleep(0.2)
        assert steps.steps - before <= 8
        gate.opened.set()
        assert all(len(answer.result(timeout=30).tokens) == 12 for answer in answers)


def test_a_short_prompt_passes_a_long_one(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, order = Gate(tiny, monkeypatch), list[str]()

    def answer(name: str, tokens: list[int]) -> None:
        tiny.generate(tokens, max_tokens=1, **GREEDY)
        order.append(name)

    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(answer, "long", PROMPTS[4])
        assert gate.reached.wait(30)
        short = pool.submit(answer, "short", PROMPTS[0])
        until(lambda: len(tiny.engine.loop._batcher._live) == 2)
        gate.opened.set()
        for each in (long, short):
            each.result(timeout=30)
    assert order == ["short", "long"]


# What goes wrong.


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
    small, preempted = start(bundle_path, cache_size=5 * BLOCK), 0
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


# Where there is one processor.


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"schedule": None}, "prefill is cpu, on the processor of decode"),
        ({"prefill": "native", "precision": None}, "prefill is native, on the processor of decode"),
        ({"decode": "portable"}, "decode is portable, not native"),
        ({"decode": "chunked"}, "decode is chunked, not native"),
    ],
)
def test_one_processor_falls_back_and_says_so(
    bundle_path: Path, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = {**PLAYED, "precision": "f32", "scheduling": "two_devices", **options}
    with caplog.at_level(logging.WARNING):
        llm = load(str(bundle_path), ctx_size=4 * BLOCK, **chosen)
    note = f"scheduling stall_free, not two_devices: {why}"
    assert note in llm.notes
    assert [record.getMessage() for record in caplog.records] == [f"{llm.name}: {note}"]
    assert llm.generate(PROMPTS[0], **SHORT).stats.scheduling == "stall_free"
    assert llm.options.scheduling == "two_devices"


def test_what_is_used_as_asked_for_needs_no_words(
    bundle_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not any("scheduling" in note for note in start(bundle_path).notes)
    assert caplog.records == []
