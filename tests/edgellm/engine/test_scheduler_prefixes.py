"""Prompts with a common prefix, which is computed once, in the simulated engine."""

from __future__ import annotations

import pytest
from simulated_engine import BLOCK, TARGET, Engine, Request, chosen, finished, numbers, taught

from edgellm.engine.prompt_rows import StallFree
from edgellm.engine.scheduler import Scheduler


def twins(count: int, *, length: int = 1000, apart: float = 0.0) -> list[Request]:
    return [Request(numbers(length), 3, arrival=i * apart) for i in range(count)]


@pytest.mark.parametrize("apart", [0.0, 0.05])
@pytest.mark.parametrize("decoding", [0, 3])
def test_equal_prompts_are_computed_once(apart: float, decoding: int) -> None:
    requests = twins(4, apart=apart)
    engine = Engine(StallFree(time_target=TARGET), sharing=True)
    engine.run([*[Request(numbers(10, start=9 + i), 200) for i in range(decoding)], *requests])
    assert [request.prefilled for request in requests] == [1000, *[1000 % BLOCK] * 3]


def test_a_prefix_is_waited_for_no_longer_than_needed() -> None:
    """Who shares three blocks of a long prompt goes on as soon as they are there."""
    long, other = Request(numbers(4000)), Request([*numbers(3 * BLOCK + 50), -5, -6, -7])
    other.arrival = 0.001
    engine = Engine(StallFree(time_target=TARGET), sharing=True)
    engine.run([long, other])
    assert other.prefilled == 53
    assert other.times[0] < long.times[0]


def test_less_than_a_block_is_not_waited_for() -> None:
    requests = [Request([*numbers(100), -i, *numbers(900, start=1)]) for i in range(3)]
    engine = Engine(StallFree(time_target=TARGET), sharing=True)
    engine.run(requests)
    assert engine.scheduler.counts.waited_for_prefix == 0


def test_other_salts_are_not_waited_for() -> None:
    requests = twins(3)
    for i, request in enumerate(requests):
        request.salt = str(i)
    engine = Engine(StallFree(time_target=TARGET), sharing=False)
    engine.run(requests)
    assert engine.scheduler.counts.waited_for_prefix == 0


def test_the_one_waited_for_is_cancelled() -> None:
    requests = twins(3)
    requests[0].cancelled_at = 0.01
    engine = Engine(StallFree(time_target=TARGET), sharing=True)
    engine.run(requests)
    assert finished(requests[1])
    assert finished(requests[2])
    assert sum(request.prefilled for request in requests[1:]) < 1500


def test_the_one_waited_for_is_preempted() -> None:
    scheduler: Scheduler[Request] = Scheduler(policy=StallFree(), costs=taught())
    urgent = Request(numbers(10, start=1), priority=1)
    leader, twin = twins(2)
    for request in (urgent, leader, twin):
        scheduler.add(request)
    assert [share.request for share in chosen(scheduler)] == [urgent, leader]
    assert scheduler.preempt() is leader
    # no room for the one in front: the other one does not wait for it either
    shares = chosen(scheduler, free=1)
    assert [share.request for share in shares] == [urgent]
    scheduler.remove(leader)
    assert twin in {share.request for share in chosen(scheduler)}


def test_an_urgent_request_hurries_the_prompt_that_it_waits_for() -> None:
    leader, other = Request(numbers(2000)), Request(numbers(3000, start=5), priority=1)
    twin = Request(numbers(1900), priority=2)
    scheduler: Scheduler[Request] = Scheduler(policy=StallFree(), costs=taught())
    scheduler.add(leader)
    chosen(scheduler)
    scheduler.add(other)
    scheduler.add(twin)
    assert chosen(scheduler)[0].request is leader
    assert twin in scheduler.waiting


def test_tokens_are_compared_once() -> None:
    """A prompt that waits for another is looked at in each step, and read in the first only."""

    class Counting(list[int]):
        slices = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counting.slices += 1
            return super().__getitem__(key)

    leader, twin = (Request(Counting(numbers(4000)), priority=i) for i in range(2))
    scheduler: Scheduler[Request] = Scheduler(policy=StallFree(), costs=taught())
    scheduler.add(leader)
    chosen(scheduler)
    scheduler.add(twin)
    chosen(scheduler)
    first = Counting.slices
    assert 0 < first <= 2 * (4000 // BLOCK + 1)
    for _ in range(5):
        chosen(scheduler)
    assert Counting.slices == first
