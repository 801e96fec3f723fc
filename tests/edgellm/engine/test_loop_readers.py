"""Readers that are slow, or many, or vanish."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from inspection import (
    live,
    paused,
    results,
    set_costs,
    step_in_readers,
    submitted,
    watch_steps,
)
from loop_checks import assert_idle, raising_once
from loops import GREEDY, alone, assert_no_new_thread, prompt, short, together, tokens_of
from waiting import Clock, until

from edgellm.engine.request import Request
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load


def test_readers_take_their_pieces_as_they_come(tiny: LLM) -> None:
    options = {**GREEDY, "max_tokens": 40, "speculate": False}
    expected = [tiny.generate(prompt(seed, 40), **options).tokens for seed in range(3)]
    read: list[list[int]] = [[] for _ in expected]

    def reader(seed: int) -> None:
        for piece in tiny.stream(prompt(seed, 40), **options):
            if piece.token is not None:
                read[seed].append(piece.token)

    with ThreadPoolExecutor(3) as pool:
        with paused(tiny) as pause:
            readers = [pool.submit(reader, seed) for seed in range(3)]
            until(lambda: len(submitted(tiny)) == 3)
            set_costs(tiny, 1e-6)  # all prompts in one step
            for count in range(1, 41):
                pause.step()
                until(lambda count=count: [len(each) for each in read] == [count] * 3)
        results(readers)
    assert [tuple(each) for each in read] == expected


def test_a_reader_hears_of_its_end_though_no_step_follows(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other answer goes away in the step in which this one ends."""
    other = tiny.stream(prompt(1, 20), max_tokens=400, **GREEDY)
    next(other)
    (going,) = live(tiny)
    both: list[int] = []

    def leaving(step: Callable[[], None]) -> None:
        step()
        both.append(len(live(tiny)))
        if both[-2:] == [2, 1]:
            tiny.engine.loop.withdraw(going)

    watch_steps(tiny, monkeypatch, leaving)
    with ThreadPoolExecutor(1) as pool:
        with paused(tiny):
            ending = pool.submit(tiny.generate, prompt(2, 20), max_tokens=9, **GREEDY)
            until(lambda: len(submitted(tiny)) == 1)
        assert len(ending.result().tokens) == 9
    other.close()


def test_a_slow_reader_gives_its_place_while_others_decode(folder: str) -> None:
    small = load(folder, ctx_size=4 * BLOCK, cache_size=5 * BLOCK)
    slow = small.stream(prompt(1, 2 * BLOCK), max_tokens=200, **GREEDY)
    fast = small.stream(prompt(2, 20), max_tokens=400, **GREEDY)
    next(slow)
    for _ in range(80):
        next(fast)  # by now the slow one has more than it has read
    third = small.stream(prompt(3, 2 * BLOCK + 5), max_tokens=200, **GREEDY)
    next(third)
    assert small.engine.loop.counts.admitted == 3
    assert len(live(small)) == 3  # none has ended
    assert len(list(slow)) >= 199
    fast.close()
    third.close()
    assert_idle(small)


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_reader_of_whole_answers_is_seldom_woken(
    tiny: LLM, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, options = [prompt(seed, 20) for seed in range(prompts)], {**GREEDY, "max_tokens": 100}
    expected = [[piece.token for piece in tiny.stream(each, **options)] for each in asked]
    wait, waits = tiny.engine.loop.wait, list[int]()

    def counted(requests: Sequence[Request]) -> None:
        waits.append(len(requests))
        wait(requests)

    monkeypatch.setattr(tiny.engine.loop, "wait", counted)
    answers = tiny.generate(asked, **options)
    assert [list(each.tokens) for each in answers] == [tokens[:100] for tokens in expected]
    # each time for 32 pieces at least, or for an end
    assert len(waits) <= prompts * (100 // 32 + 1)


def test_a_whole_answer_that_is_interrupted_stays_as_far_as_it_got(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(requests: Sequence[Request]) -> None:
        until(lambda: len(requests[0].pieces) >= 10)
        raise KeyboardInterrupt

    with tiny.session() as session:
        session.append(prompt(1, 20))
        monkeypatch.setattr(tiny.engine.loop, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(max_tokens=500, **GREEDY)
        monkeypatch.undo()
        assert len(session.tokens) >= 30
        expected = tiny.generate(prompt(1, 20), max_tokens=100, **GREEDY).tokens
        assert session.tokens[20:30] == expected[:10]


def test_a_time_limit_ends_who_waits_for_a_place(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, clock = load(folder, ctx_size=4 * BLOCK, cache_size=4 * BLOCK), Clock()
    for module in ("request", "answer"):
        monkeypatch.setattr(f"edgellm.engine.{module}.time", clock)
    step_in_readers(small, monkeypatch)
    first = small.stream(prompt(1, 3 * BLOCK), max_tokens=100, **GREEDY)
    next(first)
    watch_steps(small, monkeypatch, lambda step: (clock.advance(0.005), step()))
    limited = {**GREEDY, "time_limit_ms": 20, "max_tokens": 50}
    answer = small.generate(prompt(2, 3 * BLOCK), **limited)
    assert (answer.finish_reason, answer.tokens) == ("time", ())
    assert len(list(first)) == 100
    assert_idle(small)


@pytest.mark.slow
def test_hundreds_of_threads(tiny: LLM) -> None:
    threads = set(threading.enumerate())
    calls = short((prompt(i % 5, 10 + i % 5) for i in range(200)), max_tokens=3)
    expected = tokens_of(alone(tiny, calls[:5]))
    assert tokens_of(together(tiny, calls)) == expected * 40
    assert_no_new_thread(threads)
    assert_idle(tiny)


def vanish(llm: LLM, rng: random.Random) -> None:
    """An answer that ends in one of the ways that answers end."""
    tokens, cancel = prompt(rng.randrange(10**6), rng.randint(1, 400)), threading.Event()
    stream = llm.stream(tokens, cancel=cancel, max_tokens=30, ignore_eos=True)
    kind = rng.choice(["cancel", "close", "drop", "cycle", "session", "batch", "raise"])
    if kind == "batch":
        answers = llm.batch([tokens, tokens[:9]], n=2, max_tokens=rng.randint(1, 9))
        next(answers)
        return
    if kind == "raise":
        failing = raising_once(RuntimeError("no more"), at=rng.randint(1, 4))
        with pytest.raises(RuntimeError):
            llm.generate(tokens, max_tokens=9, ignore_eos=True, logit_filter=failing)
        return
    if kind == "session":
        session = llm.session()
        session.append(tokens)
        stream = session.fork().stream(max_tokens=30, ignore_eos=True)
    for _ in range(rng.randint(0, 5)):
        next(stream)
    if kind == "cancel":
        cancel.set()
        list(stream)
    elif kind == "close":
        stream.close()
    elif kind == "cycle":
        cycle: list[object] = [stream]
        cycle.append(cycle)


def vanishing(llm: LLM, *, seeds: Sequence[int], workers: int) -> None:
    """Answers that end in a way of each seed, twice over; afterwards all is as before."""
    before = set(threading.enumerate())
    expected = llm.generate(prompt(1, 100), max_tokens=20, **GREEDY).tokens

    def some(first: int) -> None:
        for seed in seeds[first::workers]:
            vanish(llm, random.Random(seed))

    def all_of_them() -> Counter[type]:
        with ThreadPoolExecutor(workers + 1) as pool:
            running = [pool.submit(some, i) for i in range(workers)]
            answer = pool.submit(llm.generate, prompt(1, 100), max_tokens=20, **GREEDY)
            results(running)
            assert answer.result().tokens == expected
        del answer  # how many tasks it had depends on its company
        gc.collect()
        assert_idle(llm)
        return objects()

    assert all_of_them() == all_of_them()
    assert_no_new_thread(before)


def objects() -> Counter[type]:
    """How many there are of each of our types, without cached prefixes."""
    types = Counter(type(each) for each in gc.get_objects())
    ours = {
        kind: count for kind, count in types.items() if str(kind.__module__).startswith("edgellm.")
    }
    return Counter({k: n for k, n in ours.items() if k.__module__ != "edgellm.cache.prefix_index"})


def test_answers_that_vanish(tiny: LLM) -> None:
    """In each of the ways, several times, one after the other."""
    vanishing(tiny, seeds=range(20), workers=1)


@pytest.mark.slow
def test_a_thousand_answers_that_vanish(tiny: LLM) -> None:
    vanishing(tiny, seeds=range(500), workers=8)
