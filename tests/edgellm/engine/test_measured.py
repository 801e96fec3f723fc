"""Decisions from times that vary."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.backends.planner import Costs, MeasuredPrompt
from edgellm.engine.costs import MARGIN, from_json, in_turns, to_json

# What else the machine does makes a call slower; one of some calls goes undisturbed.
delays = st.lists(st.floats(1, 30), min_size=1, max_size=5).map(lambda rest: (1.0, *rest))
seconds = st.floats(1e-6, 1.0)


def disturbed(true_seconds: float, factors: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(true_seconds * factor for factor in factors)


@given(
    native=seconds,
    call=st.floats(0, 1),
    slower=st.floats(1, 10),
    noise=st.tuples(delays, delays, delays, delays),
)
def test_noise_alone_makes_no_accelerator_faster(
    native: float, call: float, slower: float, noise: tuple[tuple[float, ...], ...]
) -> None:
    """However the calls were disturbed, one that is no faster is never taken."""
    measured = Costs(
        {32: disturbed(32 * native * slower, noise[0]), 128: disturbed(128 * native, noise[1])},
        {8: disturbed(call + 8 * native, noise[2]), 128: disturbed(call + 128 * native, noise[3])},
    )
    assert measured.advantage() < MARGIN


@given(
    native=seconds, faster=st.floats(1.6, 100), noise=st.lists(st.floats(0.95, 1.05), min_size=4)
)
def test_a_faster_one_is_taken_through_a_little_noise(
    native: float, faster: float, noise: list[float]
) -> None:
    samples = tuple(noise)
    measured = Costs(
        {128: disturbed(128 * native / faster, samples)},
        {8: disturbed(8 * native, samples), 128: disturbed(128 * native, samples)},
    )
    assert measured.advantage() > MARGIN


@given(chunk=seconds, step=seconds, provider=delays, native=delays)
def test_a_whole_prompt_decides(
    chunk: float, step: float, provider: tuple[float, ...], native: tuple[float, ...]
) -> None:
    """Whatever chunks and steps took."""
    parts = ({128: (chunk,)}, {8: (step,), 128: (20 * step,)})
    slower = Costs(*parts, MeasuredPrompt(700, disturbed(1.03, provider), disturbed(0.46, native)))
    assert slower.advantage() < MARGIN
    faster = Costs(*parts, MeasuredPrompt(700, (0.30, 0.31), (0.46, 0.47)))
    assert faster.advantage() == 0.46 / 0.31


def test_a_step_of_one_length_and_none_at_all() -> None:
    assert Costs({32: (1.0,)}).advantage() == 0
    assert Costs({32: (1.0,)}).call is None
    short = Costs({32: (1.0, 2.0)}, {1: (0.5, 0.25)})
    assert (short.call, short.token) == (0.0, 0.25)
    assert short.advantage() == 0.25 / (2.0 / 32)


@given(
    few=st.lists(seconds, min_size=1),
    many=st.lists(seconds, min_size=1),
    chunk=st.lists(seconds, min_size=1),
)
def test_kept_as_json(few: list[float], many: list[float], chunk: list[float]) -> None:
    prompt = MeasuredPrompt(7, tuple(few), tuple(many))
    for measured in (
        Costs({32: tuple(chunk)}),
        Costs({32: tuple(chunk)}, {8: tuple(few), 128: tuple(many)}, prompt),
    ):
        assert from_json(json.loads(json.dumps(to_json(measured))), (32,)) == measured
        assert measured.chunk[32] == min(chunk)
        assert measured.token >= 0
        assert (measured.call or 0) >= 0


@pytest.mark.parametrize(("limit_s", "rounds"), [(1e9, 4), (0.0, 1)])
def test_calls_take_turns(limit_s: float, rounds: int) -> None:
    """A first round to warm up, if there is time for another one."""
    called: list[str] = []
    samples = in_turns(
        {name: lambda name=name: called.append(name) for name in "ab"}, times=3, limit_s=limit_s
    )
    assert called == ["a", "b"] * rounds
    assert {name: len(found) for name, found in samples.items()} == dict.fromkeys(
        "ab", max(1, rounds - 1)
    )
