"""Prompts in one lane and tokens in the other: the answers are those of one after the other."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lane_checks import (
    LENGTHS,
    PLAYED,
    PROMPTS,
    SHORT,
    Gate,
    alone,
    assert_ended,
    start,
    together,
    tokens_of,
)
from loop_checks import GREEDY, poison_given_back, prompt, until

from edgellm import Completion
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import PlannedChunk
from edgellm.engine.embedding import embeddings
from edgellm.engine.request import Request
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

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
    gate, batcher = Gate(tiny, monkeypatch), tiny.engine.loop._batcher
    leave, ended = batcher.leave, list[int]()

    def noted(request: Request) -> None:
        ended.append(request.stats().prompt_tokens)
        leave(request)

    monkeypatch.setattr(batcher, "leave", noted)
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(tiny.generate, PROMPTS[4], max_tokens=1, **GREEDY)
        assert gate.reached.wait(30)
        short = pool.submit(tiny.generate, PROMPTS[0], max_tokens=1, **GREEDY)
        until(lambda: len(batcher._live) == 2)
        gate.opened.set()
        for each in (long, short):
            each.result(timeout=30)
    assert list(dict.fromkeys(ended)) == [len(PROMPTS[0]), len(PROMPTS[4])]


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


@pytest.mark.parametrize("precision", ["f32", "w8a16-qdq"])
@pytest.mark.parametrize("count", [33, 161, 300, 411])
def test_jobs_of_any_length_hold_the_chunks_of_the_whole_prompt(
    bundle_path: Path, precision: str, count: int
) -> None:
    """How long a job may take depends on the load; which chunk a row is in does not."""
    backend = start(bundle_path, precision=precision).engine.prefill
    assert isinstance(backend, ChunkedBackend)
    for seconds in (0.0, 4.0, 7.5, 100.0):
        plan, at = list[PlannedChunk](), 0
        while at < count:
            rows = backend.rows_within(seconds, count=count - at, start=at)
            plan += backend.plan(rows, at)
            at += rows
        assert plan == backend.plan(count)
