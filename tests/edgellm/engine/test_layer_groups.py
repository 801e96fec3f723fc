"""Which layers of which rows a step has, in the simulated engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from breadth import one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import (
    TARGET,
    Engine,
    Predicting,
    Request,
    chosen,
    finished,
    numbers,
    requests_strategy,
    streams,
    taught,
    two_cores,
)

from edgellm.engine.plan import Layers, Underway
from edgellm.engine.prefill_job import Layered
from edgellm.engine.prompt_rows import StallFree
from edgellm.engine.scheduler import Scheduler
from edgellm.engine.step_costs import StepCosts, StepLoad
from edgellm.errors import EdgeLLMError

LAYERS = 30


def layered(**options: float) -> Layered:
    return Layered(layers=LAYERS, **options)  # type: ignore[arg-type]


def heavy(load: StepLoad) -> float:
    """A model of 1.5B: reading its weights takes as long as the arithmetic of 30 rows."""
    return 0.06 + 2e-3 * load.rows + 0.2e-6 * load.positions


def experts(load: StepLoad) -> float:
    """Few rows read few of the weights: each row takes one of 16 experts."""
    return 0.002 + 0.06 * (1 - (15 / 16) ** load.rows) + 0.2e-3 * load.rows


@settings(deadline=None, max_examples=60)
@given(requests=requests_strategy, target=st.sampled_from([0.05, 0.1, 0.3]))
def test_steps_keep_to_the_target_by_what_is_predicted(
    requests: list[Request], target: float
) -> None:
    """But for one layer, or 32 rows of prompts: whoever decodes waits no longer for a step."""
    engine = Predicting(layered(time_target=target))
    engine.run(requests)
    assert all(finished(r) or r.cancelled_at < float("inf") for r in requests)
    for shares, seconds, fewest in engine.predicted:
        if any(share.decode for share in shares):
            assert seconds <= 1.13 * target + fewest


def test_a_long_prompt_goes_through_the_layers_in_groups() -> None:
    """Up to 512 rows at once, each layer once, and in steps that all take as long."""
    flowing, long = streams(5), Request(numbers(4000, start=9), 2, arrival=0.5)
    engine = Engine(layered(time_target=TARGET))
    engine.run([*flowing, long])
    groups = [
        (share.start, share.rows, share.layers, seconds)
        for shares, seconds in engine.steps
        for share in shares
        if share.request is long and share.layers is not None
    ]
    for (start, rows), piece in itertools.groupby(groups, key=lambda group: group[:2]):
        layers = [each[2] for each in piece]
        assert min(4000 - start, 300) <= rows <= 512
        assert (layers[0].first, layers[-1].end) == (0, LAYERS)
        assert all(a.end == b.first for a, b in itertools.pairwise(layers))
        sizes = [each.end - each.first for each in layers]
        assert max(sizes) - min(sizes) <= 2
    assert len({start for start, *_ in groups}) <= 10
    assert max(seconds for *_, seconds in groups) < 1.2 * TARGET
    assert max(request.gap for request in flowing) < 1.2 * TARGET


@pytest.mark.parametrize("chunk", [1, 32, 128, 300])
@pytest.mark.parametrize("length", [4000, 3200, 700])
def test_rows_rest_in_whole_chunks(chunk: int, length: int) -> None:
    """At most `resting_rows`, fewer than a step may have; but for the end of a prompt."""
    flowing, long = streams(3), Request(numbers(length, start=9), 2, arrival=0.5)
    policy = layered(time_target=TARGET, max_rows=1024, resting_rows=300, chunk_rows=chunk)
    engine = Engine(policy, law=heavy, costs=taught(heavy))
    engine.run([*flowing, long])
    resting = {
        (share.start, share.rows)
        for shares, _ in engine.steps
        for share in shares
        if share.request is long and share.layers is not None
    }
    assert len(resting) >= 2
    for start, rows in resting:
        assert rows <= 300
        assert rows % chunk == 0 or start + rows == length
    assert finished(long)


@pytest.mark.parametrize(("law", "times"), [(two_cores, 1.05), (heavy, 1.08), (experts, 0.85)])
def test_a_long_prompt_beside_streams_against_one_in_rows(
    law: Callable[[StepLoad], float], times: float
) -> None:
    """Decodes read all weights of a dense model anyway, and rows that ride with them read no more:
    nothing is won. Where more rows read more weights, prompts come sooner at the same gap."""
    firsts = []
    for policy in (StallFree(time_target=TARGET), layered(time_target=TARGET)):
        flowing, long = streams(5), Request(numbers(4000, start=9), 2, arrival=0.5)
        engine = Engine(policy, law=law, costs=taught(law))
        engine.run([*flowing, long])
        assert max(request.gap for request in flowing) < 2 * TARGET
        firsts.append(long.times[0])
    rows, layers = firsts
    assert layers - 0.5 < times * (rows - 0.5)


@pytest.mark.parametrize("decoding", [0, 5])
@pytest.mark.parametrize("later", one_in(5, (i * 0.37 for i in range(20))))
def test_a_short_prompt_behind_three_long_ones(decoding: int, later: float) -> None:
    """It goes through all layers with the decodes, whoever rests between.

    If it comes when only one of them is left, and nobody decodes, it waits for a longer step.
    """
    long = [Request(numbers(4000, start=10 + i), 2, arrival=1.0) for i in range(3)]
    short = Request(numbers(40, start=99), 2, arrival=1.0 + later)
    engine = Engine(layered(time_target=TARGET), noise=0.05)
    engine.run([*streams(decoding), *long, short])
    assert short.began is not None
    lone = long[1].times[0] < short.arrival and not decoding
    assert short.times[0] - short.arrival < (2.6 if lone else 2.1) * TARGET
    assert all(finished(request) for request in long)
    for earlier, later_one in itertools.pairwise(long):
        assert earlier.times[0] < later_one.times[0]


@pytest.mark.parametrize("later", [0.01, 0.13, 0.37, 0.7])
def test_a_more_urgent_prompt_passes_between_two_groups(later: float) -> None:
    low = Request(numbers(3000), arrival=1.0)
    high = Request(numbers(2000, start=5), arrival=1.0 + later, priority=1)
    engine = Engine(layered(time_target=TARGET))
    engine.run([*streams(2), low, high])
    assert high.began is not None
    assert high.began - high.arrival < 1.2 * TARGET
    assert high.times[0] < low.times[0]


def test_no_more_than_four_prompts_rest_at_once() -> None:
    """The fifth goes through all layers, a few rows at a time."""
    policy = layered(time_target=TARGET)
    scheduler: Scheduler[Request] = Scheduler(policy=policy, costs=taught(heavy))
    scheduler.add(Request(numbers(3000, 99), priority=-1))
    groups = []
    for i in range(6):
        scheduler.add(Request(numbers(900, i), priority=i))
        (share,) = chosen(scheduler)
        assert share.request.priority == i
        groups.append(share.layers)
        if share.layers is not None:
            share.request.underway = Underway(share.rows, share.layers.end, LAYERS)
    assert [layers is not None for layers in groups] == [True] * 4 + [False] * 2


def test_a_lone_prompt_goes_through_all_layers() -> None:
    """As with `StallFree`; but for rows that rest when the others leave."""
    for policy in (StallFree(), layered()):
        engine = Engine(policy)
        engine.run([Request(numbers(1500))])
        assert all(share.layers is None for shares, _ in engine.steps for share in shares)
    stream, long = Request(numbers(10), 7), Request(numbers(3000, 1), arrival=0.001)
    engine = Engine(layered())
    engine.run([stream, long])
    left = [s for s, _ in engine.steps if not any(share.request is stream for share in s)]
    rests = [shares[0].layers is not None for shares in left]
    assert rests == sorted(rests, reverse=True)
    assert rests.count(True) <= 3 < rests.count(False)


def test_costs_are_learnt_from_every_group() -> None:
    """Also before the first rows have passed the last layer."""
    costs = StepCosts()
    scheduler: Scheduler[Request] = Scheduler(policy=layered(time_target=TARGET), costs=costs)
    stream, long = Request(numbers(1), 99, computed=1, sampled=1), Request(numbers(4000, 1))
    stream.tokens.append(-1)
    scheduler.add(stream)
    chosen(scheduler)
    scheduler.add(long)
    (share,) = (s for s in chosen(scheduler) if s.request is long)
    assert share.layers is not None
    assert share.layers.end < LAYERS
    part = (share.layers.end - share.layers.first) / LAYERS
    slower = 2 * costs.seconds(share.load)
    scheduler.passed(share, slower * part)
    assert costs.seconds(share.load) == pytest.approx(slower, rel=0.1)


@given(st.integers(1, 600), st.lists(st.integers(1, 29), unique=True).map(sorted))
def test_parts_add_up(rows: int, ends: list[int]) -> None:
    groups = [Layers(a, b, LAYERS) for a, b in itertools.pairwise([0, *ends, LAYERS])]
    assert sum(group.part(rows) for group in groups) == rows


def test_bad_options() -> None:
    with pytest.raises(EdgeLLMError, match="`layers`"):
        Layered(layers=0)
    for name in ("resting_rows", "chunk_rows"):
        with pytest.raises(EdgeLLMError, match=f"`{name}`"):
            layered(**{name: 0})
    with pytest.raises(EdgeLLMError, match="`time_target`"):
        layered(time_target=0)
