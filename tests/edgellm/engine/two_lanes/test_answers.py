"""Prompts in one lane and tokens in the other: the answers are those of one after the other."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import (
    is_resting,
    live,
    readers,
    results,
    watch_leaving,
    watch_steps,
)
from lane_checks import LENGTHS, PLAYED, PROMPTS, assert_ended, start
from loop_checks import cancelled_at_steps, poison_given_back
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
from waiting import until

from edgellm import Completion
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import PlannedChunk
from edgellm.engine.embedding import embeddings
from edgellm.engine.loop import iterate
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

# What is computed.


@pytest.mark.parametrize(
    ("precision", "schedule"),
    [("f32", "out-of-order"), ("w8a8", "in-order"), ("w8a16-qdq", "out-of-order")],
)
def test_the_bits_are_those_of_one_after_the_other(
    bundle_path: Path, precision: str, schedule: str
) -> None:
    """Whoever else is there. Of some precisions the first token of a prompt is the host's."""
    options = {"precision": precision, "schedule": schedule}
    before = start(bundle_path, scheduling="serial", **options)
    calls = short(PROMPTS, logprobs=3)
    expected, llm = alone(before, calls), start(bundle_path, **options)
    assert_same(together(llm, calls), expected)
    assert_same(alone(start(bundle_path, **options), calls), expected)
    assert_ended(llm)


def test_every_prompt_goes_to_the_provider_whatever_its_length(tiny: LLM) -> None:
    others = [prompt(50 + i, length) for i, length in enumerate(LENGTHS)]
    for found in (alone(tiny, short(PROMPTS)), together(tiny, short(others))):
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
    expected = alone(tiny, short(PROMPTS))

    async def answers() -> list[Completion]:
        return await asyncio.gather(*(tiny.agenerate(each, **SHORT) for each in PROMPTS))

    assert_same(asyncio.run(answers()), expected)


def test_embeddings_come_between(tiny: LLM) -> None:
    def embed(llm: LLM) -> list[Any]:
        return list(iterate(llm.engine.loop, embeddings(llm.engine, PROMPTS, pooling="mean")))

    expected, fresh = embed(tiny), start(tiny.engine.bundle.path)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = begin_together(pool, fresh, short(PROMPTS))
        found = embed(fresh)
        assert_same(results(answers), alone(tiny, short(PROMPTS)))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert_ended(fresh)


@pytest.mark.slow
def test_blocks_are_its_own_until_the_thread_is_done(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were given back, or not yet written to, hold NaN."""
    llm = start(bundle_path, cache_size=8 * BLOCK, kv_format="f32")
    calls = short(PROMPTS, max_tokens=40)
    expected = alone(start(bundle_path, kv_format="f32"), calls)
    for group in llm.engine.cache.groups:
        poison_given_back(group)
    for at in ((0, 1, 2, 3), (5, 8, 13, 21)):
        assert_same(cancelled_at_steps(llm, monkeypatch, calls, at=at), expected)
    assert_ended(llm)


# At the same time.


def test_streams_go_on_while_a_prompt_is_computed(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**GREEDY, "max_tokens": 100}
    expected = tiny.generate(PROMPTS[1], **options).tokens
    stream = tiny.stream(PROMPTS[1], **options)
    read = [next(stream).token for _ in range(20)]
    gate = Gate(tiny.engine.prefill, "run", monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tiny.generate, PROMPTS[2], **SHORT)
        until(gate.reached.is_set)
        read += [piece.token for piece in stream if piece.token is not None]
        assert not answer.done()
        gate.opened.set()
        assert len(answer.result().tokens) == 12
    assert tuple(read) == expected


def test_nobody_computes_while_all_wait_for_the_provider(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, steps = Gate(tiny.engine.prefill, "run", monkeypatch), list[None]()
    watch_steps(tiny, monkeypatch, lambda step: steps.append(step()))
    with ThreadPoolExecutor(4) as pool:
        answers = begin_together(pool, tiny, short(PROMPTS[:4]))
        until(gate.reached.is_set)
        until(lambda: len(steps) == 1 and is_resting(tiny) and readers(tiny) == 4)
        gate.opened.set()
        assert [len(each.tokens) for each in results(answers)] == [12] * 4


def test_a_short_prompt_passes_a_long_one(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, ended = Gate(tiny.engine.prefill, "run", monkeypatch), list[int]()
    watch_leaving(tiny, monkeypatch, lambda each: ended.append(each.stats().prompt_tokens))
    once = {**GREEDY, "max_tokens": 1}
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(tiny.generate, PROMPTS[4], **once)
        until(gate.reached.is_set)
        short_one = pool.submit(tiny.generate, PROMPTS[0], **once)
        until(lambda: len(live(tiny)) == 2)
        gate.opened.set()
        results([long, short_one])
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
