"""Many answers at once: each as alone, whoever else is there."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import is_resting, policy, results, set_costs, used_blocks
from loop_checks import cancel_after, cancelled_at_steps
from loops import Call, alone, assert_no_new_thread, assert_same, begin_together, prompt, together
from waiting import until

from edgellm import (
    BatchRequest,
    CacheFullError,
    Completion,
    ContextOverflowError,
    GenerationOptions,
    OptionError,
)
from edgellm.backends.batch import Rows, Span
from edgellm.engine.prompt_rows import StallFree
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

REQUESTS: list[Call] = [
    (
        prompt(i % 23, (5, 60, 130, 300, 513, 40)[i % 6] + i),
        {
            "temperature": (0.0, 0.8, 1.5)[i % 3],
            "seed": i,
            "max_tokens": 4 + 5 * (i % 7),
            "ignore_eos": True,
            "repeat_penalty": 1.0 + 0.1 * (i % 2),
            "logprobs": i % 3,
        },
    )
    for i in range(30)
]


SHIFT: dict[str, Any] = {"context_policy": "shift", "keep": 9}
# Short prompts and long answers: what was admitted does not fit any more.
GROWING: list[Call] = [
    (prompt(i, 100), {"seed": i, "max_tokens": 60, "ignore_eos": True}) for i in range(6)
]


@pytest.fixture
def portable_tiny(tiny_model: Path) -> LLM:
    return load(
        str(tiny_model),
        ctx_size=4 * BLOCK,
        cache_size=64 * BLOCK,
        prefill="cpu",
        decode="portable",
    )


@pytest.fixture
def native(tiny_model: Path) -> LLM:
    llm = load(str(tiny_model), ctx_size=8 * BLOCK, cache_size=64 * BLOCK)
    if not llm.engine.decoder.exact_rows:
        pytest.skip("needs the native kernels")
    return llm


def test_thirty_answers_together_are_as_alone(native: LLM) -> None:
    expected = alone(native, REQUESTS)
    fresh = load(str(native.engine.bundle.path), ctx_size=8 * BLOCK, cache_size=64 * BLOCK)
    assert_same(together(fresh, REQUESTS), expected)
    assert used_blocks(fresh) == 0


def test_the_best_logits_lead_to_the_same_answers_as_all(
    native: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart, together, and from one prompt."""

    def answers() -> list[Completion]:
        forked = native.generate(REQUESTS[3][0], n=3, seed=1, max_tokens=9)
        return [*alone(native, REQUESTS[:8]), *together(native, REQUESTS[:8]), *forked]

    counts: list[int] = []
    run = native.engine.decoder.run

    def counted(spans: Sequence[Span], **options: Any) -> list[Rows]:
        counts.extend(span.candidates for span in spans if span.logit_rows)
        return run(spans, **options)

    monkeypatch.setattr(native.engine.decoder, "run", counted)
    few = answers()
    assert min(counts) > 0
    monkeypatch.setattr("edgellm.engine.answer.best_needed", lambda *_, **__: 0)
    counts.clear()
    assert_same(few, answers())
    assert max(counts) == 0


@pytest.mark.parametrize("scheduling", ["serial", "stall_free"])
def test_scheduling_changes_no_answer(native: LLM, scheduling: Any) -> None:
    requests = [(tokens, {**options, "speculate": False}) for tokens, options in REQUESTS[:12]]
    expected = alone(native, requests)
    options: dict[str, Any] = {"ctx_size": 8 * BLOCK, "scheduling": scheduling}
    fresh = load(str(native.engine.bundle.path), time_target_ms=20, **options)
    answers = list(
        fresh.batch((BatchRequest(prompt=t, options=GenerationOptions(**o)) for t, o in requests))
    )
    answers.sort(key=lambda answer: answer.index)
    assert_same([answer.result() for answer in answers], expected)
    steps, tokens = fresh.engine.loop.counts.steps, sum(len(a.tokens) for a in expected)
    assert (steps >= tokens) == (scheduling == "serial")
    three = fresh.generate(requests[3][0], n=3, **requests[3][1])
    assert_same(three[:1], expected[3:4])
    assert used_blocks(fresh) == 0


def test_the_time_target_reaches_the_policy(tiny_model: Path) -> None:
    chosen = policy(load(str(tiny_model), time_target_ms=20))
    assert isinstance(chosen, StallFree)
    assert chosen.time_target == pytest.approx(0.02)


def test_one_after_the_other_a_reader_that_never_comes_back_holds_nobody_up(
    tiny_model: Path,
) -> None:
    serial = load(str(tiny_model), ctx_size=8 * BLOCK, scheduling="serial")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
    expected = [serial.generate(prompt(i, 2 * BLOCK), **options).tokens for i in (1, 2)]
    stream = serial.stream(prompt(1, 2 * BLOCK), **options)
    pieces = [next(stream)]
    assert serial.generate(prompt(2, 2 * BLOCK), **options).tokens == expected[1]
    pieces += stream
    assert tuple(p.token for p in pieces if p.token is not None) == expected[0]
    assert used_blocks(serial) == 0


def test_with_a_small_pool_some_are_preempted_and_all_finish(native: LLM) -> None:
    expected = alone(native, GROWING)
    small = load(str(native.engine.bundle.path), ctx_size=4 * BLOCK, cache_size=8 * BLOCK)
    found = together(small, GROWING)
    assert_same(found, expected)
    assert sum(answer.stats.preempted for answer in found) > 0
    assert used_blocks(small) == 0


@pytest.mark.parametrize("distinct", [1, 70])
def test_short_prompts_that_begin_alike_wait_until_there_is_room(
    tiny_model: Path, distinct: int
) -> None:
    """Each takes a copy of the block with its beginning; nobody is begun without room for it."""
    small = load(str(tiny_model), ctx_size=4 * BLOCK, cache_size=8 * BLOCK)
    prompts = [[1, 2 + i % distinct, 3] for i in range(70)]
    answers = list(small.batch(prompts, max_tokens=3, ignore_eos=True, temperature=0))
    assert [answer.error for answer in answers] == [None] * 70
    assert small.engine.loop.counts.preempted == 0
    assert used_blocks(small) == 0


@pytest.mark.slow
def test_preempted_where_computing_again_gives_other_bits(
    portable_tiny: LLM,
) -> None:
    """What graphs of single tokens computed is kept, and not computed again in chunks."""
    expected = alone(portable_tiny, GROWING[:3])
    small = load(
        str(portable_tiny.engine.bundle.path),
        ctx_size=4 * BLOCK,
        cache_size=4 * BLOCK,
        prefill="cpu",
        decode="portable",
    )
    found = together(small, GROWING[:3])
    if library() is not None:  # numpy's bits depend on how many rows there are
        assert_same(found, expected)
    assert sum(answer.stats.preempted for answer in found) > 0
    assert used_blocks(small) == 0


@pytest.mark.parametrize("blocks", [pytest.param(4, marks=pytest.mark.slow), 3])
def test_answers_in_a_full_context_are_as_alone(native: LLM, blocks: int) -> None:
    """Contexts that shift, which cannot be computed again, give their places to each other."""
    requests = [
        (prompt(i, 120), {"seed": i, "max_tokens": 150, "ignore_eos": True, **SHIFT})
        for i in range(4)
    ]
    options: dict[str, Any] = {"ctx_size": 2 * BLOCK}
    path = str(native.engine.bundle.path)
    expected = alone(load(path, cache_size=64 * BLOCK, **options), requests)
    small = load(path, cache_size=blocks * BLOCK, **options)
    found = together(small, requests)
    assert_same(found, expected)
    assert all(answer.stats.dropped_tokens > 0 for answer in found)
    assert sum(answer.stats.preempted for answer in found) > 0


def test_other_answers_to_one_prompt_are_as_their_seeds(native: LLM) -> None:
    tokens = prompt(7, 200)
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    requests = [(tokens, {"seed": 40 + i, **options}) for i in range(4)]
    expected = alone(native, requests)
    fresh = load(str(native.engine.bundle.path), ctx_size=8 * BLOCK)
    found = fresh.generate(tokens, n=4, seed=40, **options)
    assert_same(found, expected)
    assert [answer.stats.cached_tokens for answer in found] == [0, 200, 200, 200]
    assert used_blocks(fresh) == 0


def test_a_stream_goes_on_while_others_begin(native: LLM) -> None:
    """One thread, two streams in turns: the steps of one are steps of the other."""
    (first, one), (second, two) = REQUESTS[4], REQUESTS[9]
    expected = [native.generate(first, **one).tokens, native.generate(second, **two).tokens]
    streams = [native.stream(first, **one), native.stream(second, **two)]
    found: list[list[int]] = [[], []]
    left = [0, 1]
    while left:
        for i in list(left):
            piece = next(streams[i], None)
            if piece is None:
                left.remove(i)
            elif piece.token is not None:
                found[i].append(piece.token)
    assert [tuple(tokens) for tokens in found] == expected


def test_a_reader_that_never_comes_back_holds_nobody_up(native: LLM) -> None:
    stream = native.stream(prompt(1, 40), temperature=0, ignore_eos=True, max_tokens=300)
    assert next(stream).token is not None
    expected = native.generate(prompt(2, 40), temperature=0, max_tokens=150, ignore_eos=True)
    assert len(expected.tokens) == 150
    assert native.engine.loop.counts.decode_rows < 300  # the other one waits for its reader
    assert len(list(stream)) >= 299
    assert used_blocks(native) == 0


def test_a_reader_that_never_comes_back_gives_its_place_to_others(tiny_model: Path) -> None:
    small = load(str(tiny_model), ctx_size=4 * BLOCK, cache_size=4 * BLOCK)
    options = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
    expected = load(str(tiny_model)).generate(prompt(1, 2 * BLOCK), **options)
    stream = small.stream(prompt(1, 2 * BLOCK), **options)
    pieces = [next(stream)]
    assert small.generate(prompt(2, 3 * BLOCK), **options).tokens
    pieces += stream
    assert tuple(p.token for p in pieces if p.token is not None) == expected.tokens
    assert pieces[-1].stats.preempted > 0
    assert used_blocks(small) == 0


def test_one_that_fails_fails_alone(native: LLM) -> None:
    def broken(scores: np.ndarray, tokens: Sequence[int]) -> None:
        if len(tokens) == 5:
            raise RuntimeError("no more")

    expected, calls = alone(native, REQUESTS[:10]), REQUESTS[:10]
    calls[4] = (calls[4][0], {**calls[4][1], "logit_filter": broken})
    with ThreadPoolExecutor(10) as pool:
        answers = begin_together(pool, native, calls)
        with pytest.raises(RuntimeError, match="no more"):
            answers.pop(4).result()
        found = results(answers)
    assert_same(found, expected[:4] + expected[5:])
    assert used_blocks(native) == 0


def test_a_step_that_fails_is_tried_with_each_by_itself(
    native: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A back end that cannot compute one token: its request fails, the others are as alone."""
    expected = alone(native, REQUESTS[:6])
    end = REQUESTS[4][0][-3:]

    def picky(spans: Sequence[Span], **options: Any) -> list[Rows]:
        if any(list(span.tokens[-3:]) == end for span in spans):
            raise ValueError("a kernel says no")
        return run(spans, **options)

    fresh = load(str(native.engine.bundle.path), ctx_size=8 * BLOCK)
    run = fresh.engine.decoder.run
    monkeypatch.setattr(fresh.engine.decoder, "run", picky)
    with ThreadPoolExecutor(6) as pool:
        answers = begin_together(pool, fresh, REQUESTS[:6])
        with pytest.raises(ValueError, match="says no"):
            answers.pop(4).result()
        found = results(answers)
    assert_same(found, [*expected[:4], expected[5]])


def test_cancelled_at_any_step(native: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While waiting, in prefill, in decode: blocks are back, and the others do not notice."""
    expected, threads = alone(native, REQUESTS[:3]), set(threading.enumerate())
    fresh = load(str(native.engine.bundle.path), ctx_size=8 * BLOCK, cache_size=64 * BLOCK)
    set_costs(fresh, 1e-3)
    steps = (0, 1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 13)
    assert_same(cancelled_at_steps(fresh, monkeypatch, REQUESTS[:3], at=steps), expected)
    assert used_blocks(fresh) == 0
    assert_no_new_thread(threads)


@pytest.mark.slow
def test_cancelled_at_random(native: LLM) -> None:
    rng, expected = random.Random(3), alone(native, REQUESTS[:3])
    threads = set(threading.enumerate())

    with ThreadPoolExecutor(12) as pool:
        cancels = [pool.submit(cancel_after, native, rng, i) for i in range(200)]
        found = alone(native, REQUESTS[:3])
        results(cancels)
    assert_same(found, expected)
    assert used_blocks(native) == 0
    assert_no_new_thread(threads)


def test_a_session_that_answers_is_not_changed(native: LLM) -> None:
    with native.session() as session:
        session.append(prompt(3, 50))
        stream = session.stream(temperature=0, max_tokens=50, ignore_eos=True)
        next(stream)
        with pytest.raises(OptionError, match="already answering"):
            next(session.stream(max_tokens=1))
        until(lambda: is_resting(native))  # all pieces are there, and not read
        session.rewind(20)
        assert session.tokens == tuple(prompt(3, 50)[:20])  # also before the stream's end
        with pytest.raises(OptionError, match="was changed"):
            list(stream)
        assert session.generate(max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_tokens_that_were_not_read_are_no_part_of_the_session(native: LLM, tmp_path: Path) -> None:
    """Though the answer is computed ahead of its reader."""
    with native.session() as session:
        session.append(prompt(3, 50))
        stream = session.stream(temperature=0, max_tokens=500, ignore_eos=True)
        for _ in range(3):
            next(stream)
        until(lambda: is_resting(native))
        read = session.tokens
        assert (len(read), session.cached) == (53, 53)
        session.save(tmp_path / "session")
        with session.fork() as fork, native.load_session(tmp_path / "session") as saved:
            assert fork.tokens == saved.tokens == read
            assert fork.cached == saved.cached == 53
        session.append([7])
        assert session.tokens == (*read, 7)
        with pytest.raises(OptionError, match="was changed"):
            list(stream)


def test_what_never_fits_is_an_error_at_once(native: LLM) -> None:
    small = load(str(native.engine.bundle.path), ctx_size=4 * BLOCK, cache_size=4 * BLOCK)
    held = small.engine.cache.sequence()
    small.engine.thread.call(lambda: held.reserve(3 * BLOCK + 5))
    with pytest.raises(CacheFullError, match="held by answers on their way"):
        small.generate(prompt(2, 3 * BLOCK), max_tokens=1)
    small.engine.thread.call(lambda: held.truncate(0))
    assert small.generate(prompt(2, 3 * BLOCK), max_tokens=1).tokens


def test_requests_of_a_batch_go_on_from_a_session(native: LLM) -> None:
    """The answers are those of the whole prompts, and the session stays as it is."""
    begun, options = (
        list(range(4, 4 + BLOCK + 31)),
        GenerationOptions(temperature=0, max_tokens=5, ignore_eos=True),
    )
    ends = [[9, 8, 7], [8, 7], [5] * 40]  # no end begins as one that may be cached before it
    expected = [native.generate([*begun, *end], options=options).tokens for end in ends]
    fresh = load(str(native.engine.bundle.path), ctx_size=native.ctx_size)
    session = fresh.session()
    session.append(begun)
    session.generate(max_tokens=0)
    requests = [BatchRequest(prompt=[*begun, *end], session=session) for end in ends]
    answers = sorted(fresh.batch(requests, options=options, n=2), key=lambda a: (a.index, a.sample))
    found = [answer.result() for answer in answers]
    assert [each.tokens for each in found[::2]] == expected == [each.tokens for each in found[1::2]]
    assert [each.stats.cached_tokens for each in found[::2]] == [len(begun)] * 3
    assert session.tokens == tuple(begun)
    assert session.cached == len(begun)
    other = BatchRequest(prompt=[7, *begun], session=session)  # nothing in common
    [answer] = fresh.batch([other], options=options)
    assert answer.result().stats.cached_tokens == 0
    session.close()
    assert used_blocks(fresh) == 0


def test_a_request_that_is_refused_holds_nothing_of_its_session(native: LLM) -> None:
    session = native.session()
    session.append([7] * 200)
    session.generate(max_tokens=0)
    request = BatchRequest(prompt=[7] * (native.ctx_size + 1), session=session)
    [answer] = native.batch([request])
    session.close()
    assert used_blocks(native) == 0
    assert isinstance(answer.error, ContextOverflowError)


def test_one_request_is_no_list_of_requests(native: LLM) -> None:
    with pytest.raises(OptionError, match="a list of them is expected"):
        native.generate(BatchRequest(prompt="a"))  # type: ignore[call-overload]


def test_a_request_of_a_batch_takes_no_session_of_another_model(native: LLM) -> None:
    other = load(str(native.engine.bundle.path), ctx_size=native.ctx_size)
    [answer] = native.batch([BatchRequest(prompt="a", session=other.session())])
    assert isinstance(answer.error, OptionError)
    assert "is of another model" in str(answer.error)


def test_a_request_of_a_batch_takes_a_session_alone(native: LLM) -> None:
    [answer] = native.batch([BatchRequest(prompt="a", session="b")])  # type: ignore[arg-type]
    assert isinstance(answer.error, OptionError)
    assert "`session` is 'b'; an edgellm.Session is expected" in str(answer.error)
