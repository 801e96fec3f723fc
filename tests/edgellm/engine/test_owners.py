"""Requests of several owners: none pushes out another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inspection import ignore_owners, remembered
from simulated_engine import TARGET, Engine, Request, finished, numbers, requests_strategy

from edgellm.engine.prompt_rows import SchedulingPolicy, Serial, StallFree
from edgellm.engine.scheduler import OwnerCounters


def test_who_comes_back_is_lifted() -> None:
    """What it was not served while it wanted nothing is no credit; what it was served stays."""
    owners = OwnerCounters()
    owners.came("a", present=())
    owners.serve({"a": 1000})
    owners.came("b", present=["a"])
    assert owners.of("b") == owners.of("a") > 0
    owners.serve({"b": 500})
    owners.came("c", present=["a", "b"])
    assert owners.of("c") == owners.of("a") < owners.of("b")
    owners.serve({"c": 2000})
    owners.came("c", present=["a"])
    assert owners.of("c") > owners.of("a")
    owners.came("b", present=["a", "b"])  # one of several that it has
    assert owners.of("b") > owners.of("a")


def test_only_who_matters_is_remembered() -> None:
    owners = OwnerCounters()
    owners.came("always", present=())
    for i in range(1000):
        owners.came(f"one of many {i}", present=["always"])
        owners.serve({"always": 5, f"one of many {i}": 1})
    assert len(remembered(owners)) < 10
    owners.came("first", present=())
    assert remembered(owners) == {"first": 0.0}


def test_a_lead_is_forgotten() -> None:
    """Who always wants a little cannot save up for an hour and then have all of the next one."""
    owners = OwnerCounters()
    owners.came("little", present=())
    owners.came("much", present=["little"])
    for _ in range(10_000):
        owners.serve({"little": 1, "much": 100})
    assert owners.of("much") - owners.of("little") < 30_000


@pytest.mark.parametrize("policy", [StallFree(time_target=TARGET), Serial(max_rows=128)])
def test_a_hundred_requests_do_not_push_out_one(policy: SchedulingPolicy) -> None:
    """The one is as long as each of the hundred, and came last."""
    many = [Request(numbers(600, start=i), 4, owner="many") for i in range(100)]
    one = Request(numbers(600, start=200), 4, arrival=0.5, owner="one")
    engine = Engine(policy, blocks=200)
    engine.run([*many, one])
    assert all(map(finished, [*many, one]))
    before = sum(request.times[0] < one.times[0] for request in many)
    assert before <= 6
    alone = Engine(policy, blocks=200)
    for request in [*many, one]:
        request.__init__(request.tokens[:600], 4, request.arrival)  # type: ignore[misc]
    alone.run([*many, one])
    assert sum(request.times[0] < one.times[0] for request in many) == 100


def test_all_who_want_more_get_as_much() -> None:
    """Though one has ten times as many requests, and another's are three times as long."""
    requests = [Request(numbers(200, start=i), 9, owner="many") for i in range(300)]
    requests += [Request(numbers(200, start=400 + i), 9, owner="few") for i in range(90)]
    requests += [Request(numbers(600, start=600 + i), 9, owner="long") for i in range(30)]
    engine = Engine(StallFree(time_target=TARGET), blocks=300)
    engine.run(requests, until=15.0)
    served = dict.fromkeys(("many", "few", "long"), 0)
    for shares, _ in engine.steps:
        for share in shares:
            served[share.request.owner] += share.rows
    assert min(served.values()) > 5000
    assert max(served.values()) - min(served.values()) < 1500


def test_a_priority_is_among_ones_own() -> None:
    """Else whoever asks for the highest one has the engine for itself."""
    urgent = [Request(numbers(900, start=i), priority=1000, owner="a") for i in range(9)]
    low, lower = (Request(numbers(900, start=20 + i), priority=-i, owner="b") for i in range(2))
    engine = Engine(StallFree(time_target=TARGET))
    engine.run([lower, *urgent, low])
    assert sorted(r.times[0] for r in urgent)[4] > lower.times[0] > low.times[0]


def test_preempted_are_those_of_who_was_served_most() -> None:
    engine = Engine(StallFree(), blocks=30)
    many = [Request(numbers(100, start=i), 600, owner="many") for i in range(8)]
    one = Request(numbers(100, start=20), 600, arrival=1.0, owner="one")
    engine.run([*many, one])
    assert engine.scheduler.counts.preempted
    assert all(map(finished, [*many, one]))
    assert one.prefilled == 100  # and computed once, though it was the newest


@settings(deadline=None, max_examples=30)
@given(requests=requests_strategy, blocks=st.integers(8, 40), owner=st.sampled_from(["", "x"]))
def test_a_single_owner_changes_nothing(requests: list[Request], blocks: int, owner: str) -> None:
    """The order is the policy's rank alone."""

    def steps(requests: list[Request]) -> list[object]:
        engine = Engine(StallFree(), blocks=blocks)
        engine.run(requests)
        return [
            [(requests.index(share.request), share.start, share.rows) for share in shares]
            for shares, _ in engine.steps
        ]

    def copies() -> list[Request]:
        return [
            Request(list(r.tokens), r.answer, r.arrival, r.priority, r.cancelled_at, owner=owner)
            for r in requests
        ]

    with_owners = steps(copies())
    with pytest.MonkeyPatch.context() as patch:
        ignore_owners(patch)
        assert steps(copies()) == with_owners
