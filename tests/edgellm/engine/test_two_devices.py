"""How much of decode's time prefill takes, and in which order prompts go, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import Request, chosen, numbers, two_cores

from edgellm.engine.plan import Share
from edgellm.engine.scheduler import Scheduler
from edgellm.engine.step_costs import StepCosts, StepLoad
from edgellm.engine.two_lanes import Pace, TwoDevices
from edgellm.errors import OptionError

# Of decode steps: their rows, by the number of the step.
Rows = Callable[[int], int]


class Lanes:
    """Decode in virtual time, and jobs of a prompt that never ends beside it.

    Args:
        factor: of a decode step while a job is on its way, by the time.
        job: seconds that a job takes.
        noise: of a step, at the most.
    """

    def __init__(
        self, pace: Pace, *, factor: Callable[[float], float], job: float, noise: float = 0.0
    ) -> None:
        self.pace, self.factor, self.job, self.noise = pace, factor, job, noise
        self.now = self.alone = self.beside = self.decoded = self.busy = self.until = 0.0
        self.toggles: list[int] = []
        self.begun: list[int] = []
        self.chance = random.Random(0)

    def run(self, steps: int, rows: Rows = lambda _: 4) -> Lanes:
        for step in range(steps):
            if self.until <= self.now and self.pace.may_prefill(decodes=True):
                self.until = self.now + self.job
                self.busy += self.job
                self.begun.append(step)
            load = StepLoad()
            for _ in range(rows(step)):
                load = load.plus(1, 500 + step % 1000)
            seconds = two_cores(load) * self.chance.uniform(1 - self.noise, 1 + self.noise)
            self.alone += seconds
            spaced, beside = self.pace.spaced, self.until > self.now
            self.beside += seconds if beside else 0.0
            seconds *= self.factor(self.now) if beside else 1.0
            (self.pace.beside if beside else self.pace.alone)(load, seconds)
            self.now += seconds
            self.decoded += seconds
            if spaced != self.pace.spaced:
                self.toggles.append(step)
        return self

    @property
    def slowdown(self) -> float:
        return self.decoded / self.alone

    @property
    def duty(self) -> float:
        """The share of the time in which a job was on its way."""
        return self.busy / self.now


def paced(slowdown: float = 1.1) -> Pace:
    return Pace(slowdown, StepCosts())


def constant(factor: float) -> Callable[[float], float]:
    return lambda _: factor


@settings(max_examples=20, deadline=None)
@given(
    slowdown=st.sampled_from([1.02, 1.1, 1.3, 2.0]),
    factor=st.floats(1.0, 4.0),
    job=st.floats(0.005, 0.1),
    noise=st.sampled_from([0.0, 0.05, 0.1]),
)
def test_decode_is_as_slow_as_it_may_be_and_no_slower(
    slowdown: float, factor: float, job: float, noise: float
) -> None:
    lanes = Lanes(paced(slowdown), factor=constant(factor), job=job, noise=noise).run(2000)
    last = job / lanes.now  # the job that was on its way in the end
    assert lanes.slowdown <= slowdown * 1.015 + last
    # of decode's work, what may be done beside prefill
    possible = 1.0 if factor <= slowdown else (slowdown - 1) / (factor - 1)
    assert lanes.beside / lanes.alone >= 0.75 * possible - last


@pytest.mark.parametrize("factor", [1.0, 1.05, 1.09])
def test_prefill_that_costs_decode_little_never_waits_long(factor: float) -> None:
    lanes = Lanes(paced(), factor=constant(factor), job=0.1, noise=0.03).run(2000)
    assert lanes.toggles == []
    assert lanes.duty > 0.9  # a few steps alone show now and then what decode takes


def test_what_is_spaced_is_spaced_for_some_steps() -> None:
    """Hysteresis: near the bound as well, where each step might change the answer."""
    for factor in (1.1, 1.11, 1.15, 1.5):
        lanes = Lanes(paced(), factor=constant(factor), job=0.004, noise=0.3).run(2000)
        begun, ended = lanes.toggles[::2], lanes.toggles[1::2]
        assert len(ended) > 5
        assert min(end - begin for begin, end in zip(begun, ended, strict=False)) >= 8


def test_prompts_go_on_when_the_machine_gets_slower() -> None:
    """Others take the processor, all steps are slower than was learnt: it is learnt anew."""
    pace = paced()
    before = Lanes(pace, factor=constant(1.3), job=0.05).run(1000)
    slower = Lanes(pace, factor=lambda now: 4.0 if now < 8 else 1.3, job=0.05).run(3000)
    assert before.duty > 0.3
    assert slower.begun[-1] > 2900
    last = [b - a for a, b in zip(slower.begun[-20:], slower.begun[-19:], strict=False)]
    assert max(last) < 60


def test_no_prompt_begins_before_it_is_known_what_decode_takes() -> None:
    pace, load = paced(), StepLoad().plus(1, 100)
    assert pace.may_prefill(decodes=False)
    for _ in range(8):
        assert not pace.may_prefill(decodes=True)
        pace.alone(load, 0.003)
    assert pace.may_prefill(decodes=True)


@pytest.mark.parametrize("change", ["many steps", "more rows", "fewer rows"])
def test_what_decode_takes_is_looked_at_again(change: str) -> None:
    pace, load = paced(), StepLoad()
    for _ in range(8):
        load = load.plus(1, 100)
    for _ in range(8):
        pace.alone(load, 0.008)
    for _ in range(99):
        pace.beside(load, 0.008)
    assert pace.may_prefill(decodes=True)
    if change == "many steps":
        pace.beside(load, 0.008)
    else:
        other = StepLoad()
        for _ in range(11 if change == "more rows" else 6):
            other = other.plus(1, 100)
        pace.beside(other, 0.011)
    assert not pace.may_prefill(decodes=True)
    pace.alone(load, 0.008)
    pace.alone(load, 0.008)
    assert pace.may_prefill(decodes=True)


def test_a_growing_number_of_streams_is_no_slowdown() -> None:
    lanes = Lanes(paced(), factor=constant(1.0), job=0.05).run(2000, lambda step: 1 + step // 100)
    assert lanes.toggles == []
    assert lanes.duty > 0.8


def test_a_slowdown_that_leaves_prompts_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="slowdown"):
        paced(1.0)


# The order of prompts, and what a step decodes.


def scheduler() -> Scheduler[Request]:
    return Scheduler(policy=TwoDevices(), costs=StepCosts())


def next_prompt(engine: Scheduler[Request]) -> Share[Request] | None:
    """What the lane is given, where everybody has room."""
    while (plan := engine.plan_prompt([10**9])).admitted:
        for request in plan.admitted:
            engine.admitted(request)
    return plan.shares[0] if plan.shares else None


def streaming(computed: int = 40) -> Request:
    """A request that decodes."""
    return Request(numbers(computed + 1), 50, computed=computed, sampled=1)


def test_steps_decode_and_nothing_else() -> None:
    engine, stream = scheduler(), streaming()
    engine.add(stream)
    assert chosen(engine) == []  # it was never admitted
    assert next_prompt(engine) is None  # it has its place, and nothing to prefill
    assert list(engine.running) == [stream]
    prompts = [Request(numbers(n, start=n), 5) for n in (3000, 40)]
    for prompt in prompts:
        engine.add(prompt)
    for _ in range(3):
        assert chosen(engine) == [Share(stream, 40, 1, decode=True)]
    assert list(engine.waiting) == prompts


def test_the_shortest_goes_first_and_with_all_that_is_left() -> None:
    engine = scheduler()
    long, short = Request(numbers(3000, start=1), 5), Request(numbers(40, start=2), 5)
    engine.add(long)
    engine.add(short)
    assert next_prompt(engine) == Share(short, 0, 40, decode=False)
    assert list(engine.running) == [short]
    short.computed, short.sampled = 40, 1
    short.tokens.append(7)
    assert next_prompt(engine) == Share(long, 0, 3000, decode=False)
    long.computed = 512
    assert next_prompt(engine) == Share(long, 512, 2488, decode=False)
    assert chosen(engine) == [Share(short, 40, 1, decode=True)]


def test_who_waits_gets_its_turn_whatever_comes_after() -> None:
    """Short prompts come all the time: a long one ages, as it does in shared steps."""
    engine, rows = scheduler(), 256
    long = Request(numbers(3000, start=1), 5)
    engine.add(long)
    jobs = 0
    while long.computed < 3000:
        engine.add(Request(numbers(200, start=2 + jobs), 5))
        share = next_prompt(engine)
        assert share is not None
        count = min(share.rows, rows)
        engine.count([Share(share.request, share.start, count, decode=False)])
        share.request.computed += count
        if share.request is not long and share.request.computed == len(share.request.tokens):
            engine.remove(share.request)
        jobs += 1
        assert jobs < 60


def test_a_short_prompt_passes_long_ones_that_have_begun() -> None:
    engine = scheduler()
    for start in (1, 2, 3):
        engine.add(Request(numbers(4096, start=start), 5))
    first = next_prompt(engine)
    assert first is not None
    short = Request(numbers(40, start=9), 5)
    engine.add(short)  # while the first rows of another one are on their way
    first.request.computed = 512
    engine.count([Share(first.request, 0, 512, decode=False)])
    share = next_prompt(engine)
    assert share is not None
    assert share.request is short


def test_who_finds_no_room_waits_and_nobody_is_admitted_beside() -> None:
    engine = scheduler()
    prompts = [Request(numbers(n, start=n), 5) for n in (40, 90)]
    for prompt in prompts:
        engine.add(prompt)
    running = Request(numbers(3), 5)
    engine.add(running)
    assert next_prompt(engine) == Share(running, 0, 3, decode=False)
    running.computed = 3
    plan = engine.plan_prompt([0])
    assert (plan.shares, plan.admitted) == ([], {})
    assert plan.refused is not None
    assert plan.refused.request is prompts[0]
    assert engine.wants_room
    share = next_prompt(engine)
    assert share is not None
    assert list(engine.running) == [running, share.request]
    assert not engine.wants_room


def test_one_that_waits_for_a_prefix_hands_its_turn_on() -> None:
    engine = scheduler()
    first, twin = Request(numbers(1000), 5), Request(numbers(1000), 5)
    engine.add(first)
    assert next_prompt(engine) == Share(first, 0, 1000, decode=False)
    first.computed = 128
    engine.add(twin)
    share = next_prompt(engine)
    assert share == Share(first, 128, 872, decode=False)
    assert list(engine.running) == [first]


@pytest.mark.parametrize("stretch", [0.5, 1.0, 1.7, 6.0])
def test_jobs_end_within_the_target_whatever_chunks_take_beside_decode(stretch: float) -> None:
    """Chunks of 10 ms by themselves: as many as fit, once a few jobs were seen; one at least."""
    pace, target, chunk = paced(), 0.1, 0.01
    assert pace.expected_within(target) == target
    for _ in range(12):
        expected = chunk * max(1, int(pace.expected_within(target) / chunk))
        pace.job(expected, stretch * expected)
    assert stretch * expected <= target * 1.001
    if stretch >= 1:
        assert stretch * (expected + chunk) > target


def test_a_job_of_no_known_time_says_nothing() -> None:
    pace = paced()
    pace.job(0.0, 3.0)
    assert pace.expected_within(0.1) == 0.1
