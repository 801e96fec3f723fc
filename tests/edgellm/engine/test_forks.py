"""Several answers to a prompt in small caches: they hold its blocks while they wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_without_model import ask, finish, sampled, start, step, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from inspection import all_submitted, results, running, set_costs, used_blocks, waiting

from edgellm.cache.groups import pool_blocks
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import load

CTX = 512
SCHEDULING = ["serial", "stall_free"]


def test_answers_that_wait_give_their_blocks_to_those_that_run() -> None:
    """Else the only one that runs would fail for want of a block."""
    llm = start(CTX, blocks=5)
    long = ask(llm, tokens(0, 200), max_tokens=250)
    step(llm, long)
    requests = [*long, *ask(llm, tokens(1, 200), n=3, max_tokens=100)]
    finish(llm, requests)
    assert any(request.stats().preempted for request in requests[2:])


@settings(deadline=None, max_examples=6)
@given(
    asks=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 4), st.integers(1, 210), st.integers(0, 60)),
        min_size=1,
        max_size=4,
    ),
    more=st.integers(0, 6),
    scheduling=st.sampled_from(SCHEDULING),
    kind=st.sampled_from([{}, {"exact": False}, {"apart": True}]),
)
def test_all_answers_finish_in_any_cache_that_holds_one(
    asks: list[tuple[int, int, int, int]], more: int, scheduling: Any, kind: dict[str, Any]
) -> None:
    """Later ones, too, and with what their preemption keeps outside the cache."""
    llm = start(CTX, blocks=pool_blocks(CTX) + more, scheduling=scheduling, **kind)
    requests = []
    for i, (length, n, max_tokens, steps) in enumerate(asks):
        requests += ask(llm, tokens(i, length), n=n, max_tokens=max_tokens)
        for _ in range(steps):
            step(llm, requests)
    finish(llm, requests)
    expected = [max_tokens for _, n, max_tokens, _ in asks for _ in range(n)]
    assert [sampled(request) for request in requests] == expected


def test_who_was_just_preempted_is_not_computed() -> None:
    """Prompts and decodes are two calls here, the first of which needed the blocks."""
    llm = start(CTX, blocks=13, apart=True)
    decoding = [ask(llm, tokens(i, 371 + 4 * i), max_tokens=60)[0] for i in range(3)]
    while not all(sampled(request) for request in decoding):
        step(llm, decoding)
    set_costs(llm, 1.0)  # the next prompt is in its middle when they need more blocks
    requests = [*decoding, *ask(llm, tokens(9, 380), max_tokens=10)]

    def who_waits_holds_nothing() -> None:
        assert not any(request.holding for request in waiting(llm))

    finish(llm, requests, each=who_waits_holds_nothing)
    assert sum(request.stats().preempted for request in requests) > 0


def test_one_after_the_other_all_answers_to_a_prompt_come_before_the_next_prompt() -> None:
    llm = start(CTX, blocks=40, scheduling="serial")
    asks = [ask(llm, tokens(i, 200 - 90 * i), n=3, max_tokens=20) for i in range(2)]
    requests = [answer for answers in asks for answer in answers]
    order: list[int] = []

    def note() -> None:
        order.extend(requests.index(each) // 3 for each in running(llm))

    finish(llm, requests, each=note)
    assert order == sorted(order)


@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_they_are_the_same_answers_in_a_small_cache(folder: str, scheduling: Any) -> None:
    """A model's: those that give back their blocks are computed again, to the same bits."""
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "seed": 5}
    prompts = [tokens(i, 150 + 40 * i) for i in range(3)]
    large = load(folder, ctx_size=CTX, cache_size=32 * BLOCK)
    expected = [large.generate(each, n=3, **options) for each in prompts]
    small = load(folder, ctx_size=CTX, cache_size=CTX, scheduling=scheduling)
    with ThreadPoolExecutor(3) as pool:
        with all_submitted(small, 3):
            futures = [pool.submit(small.generate, each, n=3, **options) for each in prompts]
        found = results(futures)
    preempted = any(answer.stats.preempted for answers in found for answer in answers)
    assert preempted == (scheduling != "serial")
    assert [[a.tokens for a in answers] for answers in found] == [
        [a.tokens for a in answers] for answers in expected
    ]
    assert used_blocks(small) == 0
