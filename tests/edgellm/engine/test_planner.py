from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.backends.planner import Costs, PlannedChunk, plan_chunks

# SmolLM2-135M in int8 on two cores with AVX-512 VNNI: 11.7 ms for 32 rows, 29.6 ms for 128.
CHUNKS = {32: 11.7, 128: 29.6}


def costs_of(chunks: dict[int, float], call: float | None = None, token: float = 0.0) -> Costs:
    step = {} if call is None else {count: (call + token * count,) for count in (1, 2)}
    return Costs({size: (seconds,) for size, seconds in chunks.items()}, step)


def cost(plan: list[PlannedChunk], costs: Costs) -> float:
    return sum(
        costs.chunk[p.size] if p.size else (costs.call or 0) + costs.token * p.count for p in plan
    )


@given(
    tokens=st.integers(0, 3000),
    chunks=st.dictionaries(st.integers(1, 512), st.floats(1e-3, 10), min_size=1, max_size=4),
    call=st.none() | st.floats(0, 5),
    token=st.floats(0, 1),
    tails_only=st.booleans(),
)
def test_every_token_is_in_one_chunk(
    tokens: int, chunks: dict[int, float], call: float | None, token: float, tails_only: bool
) -> None:
    plan = plan_chunks(tokens, costs_of(chunks, call, token), tails_only=tails_only)
    assert sum(chunk.count for chunk in plan) == tokens
    for chunk in plan[:-1]:
        assert chunk.size == chunk.count
    if plan:
        last = plan[-1]
        assert last.count >= 1
        if last.size is None:
            assert call is not None
            assert last.count < min(chunks) or not tails_only
        else:
            assert last.count <= last.size


@given(tokens=st.integers(1, 40), call=st.floats(0, 5), token=st.floats(0, 1))
def test_short_prompts_are_planned_best(tokens: int, call: float, token: float) -> None:
    """Against all ways to cut them, written out."""
    costs = costs_of({4: 1.0, 16: 2.5}, call, token)
    ways = []
    for small, large in itertools.product(range(11), range(4)):
        left = tokens - 4 * small - 16 * large
        whole = small + 2.5 * large
        if 0 < left < 4:
            ways.append(whole + call + token * left)
        if left <= 0:
            ways.append(whole)
    assert cost(plan_chunks(tokens, costs), costs) <= min(ways) + 1e-9


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, []),
        (1, [(32, 1)]),
        (33, [(32, 32), (32, 1)]),
        (65, [(128, 65)]),
        (129, [(128, 128), (32, 1)]),
        (512, [(128, 128)] * 4),
    ],
)
def test_without_a_host(tokens: int, expected: list[tuple[int, int]]) -> None:
    assert [(p.size, p.count) for p in plan_chunks(tokens, costs_of(CHUNKS))] == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, [(None, 1)]),
        (10, [(None, 10)]),
        (20, [(32, 20)]),
        (40, [(32, 32), (None, 8)]),
        (133, [(128, 128), (None, 5)]),
        (148, [(128, 128), (32, 20)]),
        (165, [(128, 128), (32, 32), (None, 5)]),
    ],
)
def test_short_tails_go_to_the_host(tokens: int, expected: list[tuple[int | None, int]]) -> None:
    costs = costs_of(CHUNKS, call=4.0, token=0.75)
    assert [(p.size, p.count) for p in plan_chunks(tokens, costs)] == expected


@given(
    tokens=st.integers(1, 1500),
    sizes=st.sampled_from([(32, 128), (32, 64, 128), (32, 64, 256), (48, 128), (128,)]),
    data=st.data(),
)
def test_a_part_of_a_plan_is_the_plan_of_that_part(
    tokens: int, sizes: tuple[int, ...], data: st.DataObject
) -> None:
    """So a row is in a chunk of the same size wherever a prompt is cut between its chunks."""
    call = data.draw(st.floats(0, 3))
    costs = costs_of({size: call + size * data.draw(st.floats(0.02, 0.03)) for size in sizes})
    plan = plan_chunks(tokens, costs)
    at = data.draw(st.integers(0, len(plan)))
    first, rest = (sum(chunk.count for chunk in part) for part in (plan[:at], plan[at:]))
    parts = plan_chunks(first, costs) + plan_chunks(rest, costs)
    assert [chunk.count for chunk in parts] == [chunk.count for chunk in plan] or cost(
        parts, costs
    ) == pytest.approx(cost(plan, costs))  # two that cost the same
    assert sorted(plan, key=lambda chunk: -(chunk.size or 0)) == plan
