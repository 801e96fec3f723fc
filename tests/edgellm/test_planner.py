from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.planner import plan_chunks


@given(
    tokens=st.integers(1, 3000),
    sizes=st.lists(st.integers(1, 512), min_size=1, max_size=4, unique=True),
)
def test_every_token_is_in_one_chunk(tokens: int, sizes: list[int]) -> None:
    plan = plan_chunks(tokens, sizes)
    assert sum(count for _, count in plan) == tokens
    assert all(size in sizes and 1 <= count <= size for size, count in plan)
    assert all(count == size for size, count in plan[:-1])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, [(32, 1)]),
        (32, [(32, 32)]),
        (33, [(32, 32), (32, 1)]),
        (64, [(32, 32), (32, 32)]),
        (65, [(128, 65)]),
        (127, [(128, 127)]),
        (128, [(128, 128)]),
        (129, [(128, 128), (32, 1)]),
        (256, [(128, 128), (128, 128)]),
        (0, []),
    ],
)
def test_edges(tokens: int, expected: list[tuple[int, int]]) -> None:
    assert plan_chunks(tokens, (32, 128)) == expected
