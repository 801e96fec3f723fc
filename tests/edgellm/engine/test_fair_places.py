"""Places among those that run: neither many answers nor long ones keep others out."""

from __future__ import annotations

import pytest
from engine_without_model import ask, finish, sampled, start, step, tokens
from inspection import policy, running
from simulated_engine import (
    TARGET,
    Engine,
    Request,
    chosen,
    finished,
    forked,
    numbers,
    refused,
    with_forks,
)

from edgellm.engine.prompt_rows import Serial, StallFree
from edgellm.engine.scheduler import Scheduler
from edgellm.engine.step_costs import StepCosts

PLACES = 64


@pytest.mark.slow
def test_another_owner_has_a_place_at_once_and_soon_as_many() -> None:
    llm = start(512, blocks=400)
    mine = [ask(llm, tokens(i, 8), max_tokens=200, owner="a")[0] for i in range(PLACES)]
    while not all(map(sampled, mine)):
        step(llm, mine)
    theirs = [ask(llm, tokens(100 + i, 8), max_tokens=200, owner="b")[0] for i in range(PLACES)]
    everybody = [*mine, *theirs]
    for _ in range(3):
        step(llm, everybody)
    assert any(map(sampled, theirs))
    for _ in range(PLACES):
        step(llm, everybody)
    assert sorted(request.owner for request in running(llm)) == ["a"] * 32 + ["b"] * 32
    taken = llm.engine.loop.counts.preempted
    assert taken <= 32 + 32  # and by those of its own who still have none; none back and forth
    for _ in range(20):
        step(llm, everybody)
    assert llm.engine.loop.counts.preempted == taken
    finish(llm, everybody)


@pytest.mark.slow
def test_several_answers_to_each_prompt_keep_no_other_prompt_out() -> None:
    """Without keys: all are of one owner. The other would wait for some of 80 answers to end."""
    llm = start(512, blocks=900)
    many = [answer for i in range(5) for answer in ask(llm, tokens(i, 20), n=16, max_tokens=60)]
    while len(running(llm)) < PLACES:
        step(llm, many)
    (other,) = ask(llm, tokens(99, 200), max_tokens=30)
    quantum = policy(llm).quantum
    for _ in range(int(quantum / PLACES) + 12):  # it takes some to be computed
        step(llm, [*many, other])
    assert sampled(other)
    assert not any(request.finished for request in many)
    finish(llm, [*many, other])


def test_other_answers_to_a_prompt_rank_as_it_did() -> None:
    """Not as prompts with one token left, which would pass everybody."""
    first = forked(Request(numbers(600), 300), 5)
    before = Request(numbers(500, start=1), 3, arrival=0.001)
    engine = Engine(StallFree(time_target=TARGET, max_running=2, quantum=10**6))
    forks = first.forks
    engine.run([first, before, Request(numbers(9, start=2), 3, arrival=0.002)])
    assert all(map(finished, [first, before, *forks]))
    # the first place that comes free is for the prompt that came before the answers began
    began = [fork.times[1] for fork in forks if len(fork.times) > 1]
    assert before.times[0] < min(began)


@pytest.mark.parametrize("owner", ["", "b"])
def test_one_after_the_other_is_to_the_end(owner: str) -> None:
    long = Request(numbers(100), 3000, owner="a" if owner else "")
    late = Request(numbers(50, start=1), 5, arrival=0.5, owner=owner)
    engine = Engine(Serial())
    engine.run([long, late])
    assert late.times[0] > long.times[-1]
    assert not engine.scheduler.counts.preempted


def scheduler_of(requests: list[Request], **limits: int) -> Scheduler[Request]:
    """All run and decode."""
    scheduler: Scheduler[Request] = Scheduler(policy=StallFree(**limits), costs=StepCosts())
    for request in requests:
        scheduler.add(request)
    while not all(request.sampled for request in requests):
        shares = chosen(scheduler)
        scheduler.done(shares, 0.01)
        for share in shares:
            share.request.computed += share.rows
            if share.request.computed == len(share.request.tokens):
                share.request.sampled += 1
                share.request.tokens.append(-1)
    return scheduler


def test_a_place_is_taken_for_a_prompt_that_has_waited_a_quantum() -> None:
    """From the newest that has run as long, and not of a higher priority; once for each prompt."""
    old, new = Request(numbers(20)), Request(numbers(20, start=1))
    scheduler = scheduler_of([old, new], max_running=2, quantum=100)
    late, urgent = Request(numbers(20, start=2)), Request(numbers(30, start=3), priority=1)
    scheduler.add(late)
    scheduler.add(urgent)

    def pass_rows(count: int) -> None:
        scheduler.counts.decode_rows += count

    pass_rows(100)
    assert scheduler.make_way() is None
    pass_rows(1)
    assert scheduler.make_way() is new
    assert [share.request for share in chosen(scheduler)][-1] is urgent
    assert scheduler.make_way() is old
    assert [share.request for share in chosen(scheduler)][-1] is late
    pass_rows(1000)
    assert scheduler.make_way() is None  # who waits now has had its turn
    assert scheduler.running == {urgent, late}


def test_no_request_makes_way_for_a_lower_priority() -> None:
    urgent = Request(numbers(20), priority=1)
    scheduler = scheduler_of([urgent], max_running=1, quantum=1)
    scheduler.add(Request(numbers(30, start=2)))
    scheduler.counts.decode_rows += 1000
    assert scheduler.make_way() is None
    scheduler.add(Request(numbers(30, start=3), priority=1))
    scheduler.counts.decode_rows += 1000
    assert scheduler.make_way() is urgent


def test_blocks_are_taken_for_an_owner_with_fewer_places_as_well() -> None:
    """Not within an owner, where computing them again would be for nothing."""
    mine = [Request(numbers(20, start=i), owner="a") for i in range(4)]
    scheduler = scheduler_of(mine, max_running=9)
    own = Request(numbers(30, start=8), owner="a")
    scheduler.add(own)
    refused(scheduler)
    scheduler.counts.decode_rows += 10_000
    assert scheduler.make_way() is None
    scheduler.add(Request(numbers(30, start=9), owner="b"))
    scheduler.done(refused(scheduler), 0.01)
    assert scheduler.make_way() is mine[3]


def test_all_finish_whose_places_are_taken() -> None:
    requests = [
        forked(Request(numbers(100, start=i), 60, arrival=i * 0.05, owner="ab"[i % 2]), 1 + i % 3)
        for i in range(30)
    ]
    everybody = with_forks(requests)
    engine = Engine(StallFree(max_running=4, quantum=20), blocks=60)
    engine.run(requests)
    assert all(map(finished, everybody))
    assert engine.scheduler.counts.preempted > 10
