from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.step_costs import StepCosts, StepLoad

# SmolLM2-135M on two cores with AVX-512 VNNI, milliseconds of a step of so many rows at position 0.
MEASURED = {1: 3.1, 4: 5.7, 8: 9.0, 16: 16.0, 64: 38.0, 128: 62.0, 256: 115.0, 512: 239.0}
ATTENTION = 0.17e-6  # seconds for each row and position
EMPTY = StepLoad()


def prompt(rows: int, position: int = 0, decodes: int = 0) -> StepLoad:
    load = EMPTY
    for _ in range(decodes):
        load = load.plus(1, 0)
    return load.plus(rows, position)


def small_model(load: StepLoad) -> float:
    """Seconds between the points that were measured."""
    sizes = list(MEASURED)
    i = min(max(bisect.bisect_left(sizes, load.rows), 1), len(sizes) - 1)
    low, high = sizes[i - 1], sizes[i]
    # without the attention of a prompt to itself, which is in the measured times
    a, b = (MEASURED[n] / 1000 - ATTENTION * n * (n - 1) / 2 for n in (low, high))
    return a + (b - a) * (load.rows - low) / (high - low) + ATTENTION * load.positions


def bandwidth_bound(load: StepLoad) -> float:
    """A large model: a few rows cost as much as one, many rows cost each the same."""
    return max(0.1, 0.02 + 6e-3 * load.rows) + 2e-6 * load.positions + 1e-3 * load.spans


def taught(law: Callable[[StepLoad], float]) -> StepCosts:
    """After a stream of decode steps and of chunks of prompts at all positions."""
    costs, chance = StepCosts(), random.Random(0)
    for _ in range(400):
        load = EMPTY
        for _ in range(chance.choice([0, 1, 1, 2, 5, 12])):
            load = load.plus(1, chance.randrange(4096))
        if not load.rows or chance.random() < 0.5:
            rows = chance.choice([32, 50, 90, 130, 200, 260, 512])
            load = load.plus(rows, chance.randrange(4096))
        costs.learn(load, law(load) * chance.uniform(0.9, 1.1))
    return costs


def test_the_first_step_of_a_prompt_is_modest() -> None:
    """Before anything was measured."""
    rows = StepCosts().rows_within(0.1, 0, beside=EMPTY.plus(1, 0), limit=512)
    assert 32 <= rows <= 48


@pytest.mark.parametrize("rows", MEASURED)
def test_fits_what_was_measured(rows: int) -> None:
    predicted = taught(small_model).seconds(prompt(rows))
    assert predicted == pytest.approx(MEASURED[rows] / 1000, rel=0.15)


@pytest.mark.parametrize("law", [small_model, bandwidth_bound])
@pytest.mark.parametrize("position", [0, 500, 2048, 4096])
@pytest.mark.parametrize("decodes", [1, 5, 12])
def test_rows_within_a_target_take_as_long(
    law: Callable[[StepLoad], float], position: int, decodes: int
) -> None:
    target = 0.1 if law is small_model else 0.5
    beside = EMPTY
    for _ in range(decodes):
        beside = beside.plus(1, 1000)
    rows = taught(law).rows_within(target, position, beside=beside, limit=512)
    assert rows >= 16
    taken = law(beside.plus(rows, position))
    assert taken == pytest.approx(target, rel=0.15)


def test_few_rows_say_little_of_many() -> None:
    """A slow first step, a stream of answers, 32 rows that were faster than predicted."""
    costs = StepCosts()
    costs.learn(prompt(10), 0.1)
    for position in range(60):
        costs.learn(EMPTY.plus(1, position), 0.006)
    costs.learn(EMPTY.plus(1, 60).plus(32, 0), 0.037)
    beside = EMPTY.plus(1, 61)
    assert costs.seconds(beside.plus(511, 32)) < 0.1
    assert costs.rows_within(0.1, 32, beside=beside, limit=511) < 128


@given(
    seconds=st.lists(st.floats(1e-7, 1e3), max_size=30),
    rows=st.integers(1, 512),
    target=st.floats(1e-4, 10),
    position=st.integers(0, 8192),
    decodes=st.integers(0, 20),
    limit=st.integers(-3, 512),
)
def test_more_is_never_cheaper(
    seconds: list[float], rows: int, target: float, position: int, decodes: int, limit: int
) -> None:
    """Whatever nonsense was measured; and the rows are the most that fit."""
    costs = StepCosts()
    for i, value in enumerate(seconds):
        costs.learn(prompt(1 + (i * rows) % 512, i * position, decodes * (i % 2)), value)
    load = prompt(rows, position, decodes)
    assert math.isfinite(costs.seconds(load))
    assert 0 <= costs.seconds(load) <= costs.seconds(prompt(rows + 1, position, decodes))
    assert costs.seconds(load) <= costs.seconds(prompt(rows, position + 1, decodes))
    beside = EMPTY.plus(decodes, 10) if decodes else EMPTY
    fitting = costs.rows_within(target, position, beside=beside, limit=limit)
    assert 0 <= fitting <= max(limit, 0)
    if fitting:
        assert costs.seconds_at_most(beside.plus(fitting, position)) <= target
    if fitting < limit:
        assert costs.seconds_at_most(beside.plus(fitting + 1, position)) > target


@pytest.mark.parametrize("factor", [10, 100])
def test_a_hiccup_changes_little(factor: float) -> None:
    costs = taught(small_model)
    before = costs.rows_within(0.1, 1000, beside=EMPTY, limit=512)
    for load in (prompt(1), prompt(128, 1000)):
        costs.learn(load, factor * small_model(load))
        after = costs.rows_within(0.1, 1000, beside=EMPTY, limit=512)
        assert after == pytest.approx(before, rel=0.05)


def test_one_step_in_twenty_with_a_hiccup() -> None:
    costs, chance = StepCosts(), random.Random(1)
    for i in range(600):
        load = prompt(chance.choice([1, 2, 5, 64, 128, 200]), chance.randrange(2000))
        costs.learn(load, small_model(load) * (10 if i % 20 == 7 else chance.uniform(0.95, 1.05)))
    rows = costs.rows_within(0.1, 1000, beside=EMPTY, limit=512)
    assert small_model(prompt(rows, 1000)) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_machine_that_stays_slower_or_faster_is_noticed(factor: float) -> None:
    """Hot, or with other programs running: within a dozen steps."""
    costs, chance = taught(small_model), random.Random(2)
    for _ in range(12):
        load = prompt(chance.choice([64, 128, 200]), chance.randrange(2000), decodes=2)
        costs.learn(load, factor * small_model(load))
    load = prompt(128, 1000, decodes=2)
    assert costs.seconds(load) == pytest.approx(factor * small_model(load), rel=0.2)


@pytest.mark.parametrize("seconds", [1e-5, 1.0, 60.0])
def test_a_wrong_first_measurement_is_mended(seconds: float) -> None:
    """The first step touches all memory for the first time; a clock may be coarse."""
    costs, chance = StepCosts(), random.Random(3)
    costs.learn(prompt(1), seconds)
    for _ in range(30):
        load = prompt(chance.choice([1, 64, 128]), chance.randrange(2000))
        costs.learn(load, small_model(load))
    for rows in (1, 128):
        load = prompt(rows, 1000)
        assert costs.seconds(load) == pytest.approx(small_model(load), rel=0.25)


def test_long_decoding_leaves_what_is_known_of_prompts() -> None:
    costs, chance = taught(small_model), random.Random(4)
    before = costs.rows_within(0.1, 0, beside=EMPTY.plus(1, 0), limit=512)
    for i in range(20_000):
        load = EMPTY.plus(1, i % 4096)
        costs.learn(load, small_model(load) * chance.uniform(0.8, 1.2))
    after = costs.rows_within(0.1, 0, beside=EMPTY.plus(1, 0), limit=512)
    assert after == pytest.approx(before, rel=0.2)
    load = prompt(200, 100, decodes=1)
    costs.learn(load, small_model(load))
    assert costs.seconds(load) == pytest.approx(small_model(load), rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_left_out(seconds: float) -> None:
    costs = StepCosts()
    before = costs.seconds(prompt(100))
    costs.learn(prompt(100), seconds)
    costs.learn(EMPTY, 1.0)
    assert costs.seconds(prompt(100)) == before
    assert costs.seconds(EMPTY) == 0
