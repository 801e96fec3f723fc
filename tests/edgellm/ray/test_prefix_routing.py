"""Where requests go: to the replica that has their prefix, within bounds."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import OptionError
from edgellm.ray.prefix_routing import PrefixRouting

PREFIX = [b"a", b"ab", b"abc", b"abcd"]


@pytest.fixture
def draw() -> random.Random:
    return random.Random(0)


def idle(*replicas: str) -> dict[str, int]:
    return dict.fromkeys(replicas, 0)


def test_a_prefix_goes_where_it_was(draw: random.Random) -> None:
    routing = PrefixRouting()
    routing.sent(PREFIX, "two")
    for _ in range(50):
        assert routing.ranked(PREFIX, idle("one", "two", "three"), draw=draw)[0] == "two"
        assert routing.ranked([*PREFIX, b"x"], idle("one", "two"), draw=draw)[0] == "two"


def test_the_longest_prefix_counts(draw: random.Random) -> None:
    routing = PrefixRouting()
    routing.sent(PREFIX, "long")
    routing.sent(PREFIX[:2], "short")
    assert routing.ranked(PREFIX, idle("short", "long"), draw=draw)[0] == "long"
    routing.sent([b"other", b"ab", b"abc", b"abcd", b"more"], "middle")  # has no beginning of it
    assert routing.ranked([*PREFIX, b"more"], idle("middle", "long"), draw=draw)[0] == "long"


def test_who_has_too_much_to_do_is_spared(draw: random.Random) -> None:
    routing = PrefixRouting(most_ahead=3)
    routing.sent(PREFIX, "one")
    assert routing.ranked(PREFIX, {"one": 5, "two": 2}, draw=draw) == ["one", "two"]
    assert routing.ranked(PREFIX, {"one": 6, "two": 2}, draw=draw) == ["two", "one"]
    routing.sent(PREFIX, "two")  # which has it as well, then
    assert routing.ranked(PREFIX, {"one": 9, "two": 5, "three": 4}, draw=draw)[0] == "two"


def test_a_small_part_is_no_reason(draw: random.Random) -> None:
    routing = PrefixRouting(least_share=0.5)
    routing.sent(PREFIX[:1], "one")
    firsts = Counter(routing.ranked(PREFIX, idle("one", "two"), draw=draw)[0] for _ in range(200))
    assert min(firsts["one"], firsts["two"]) > 50


def test_without_a_prefix_the_less_busy_of_two(draw: random.Random) -> None:
    routing = PrefixRouting()
    busy = {"a": 0, "b": 1, "c": 2, "d": 3}
    firsts = Counter(routing.ranked([], busy, draw=draw)[0] for _ in range(600))
    assert firsts["a"] > firsts["b"] > firsts["c"] > 0
    assert firsts["d"] == 0  # the busier one of any two
    assert routing.ranked([], {}, draw=draw) == []


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40), min_size=1),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abcdefgh"))),
    st.integers(0, 10),
)
def test_the_load_is_bounded(busy: dict[str, int], sent: list[tuple[int, str]], ahead: int) -> None:
    routing = PrefixRouting(most_ahead=ahead)
    for length, replica in sent:
        routing.sent(PREFIX[:length], replica)
    order = routing.ranked(PREFIX, busy, draw=random.Random(1))
    assert sorted(order) == sorted(busy)
    allowed = min(busy.values()) + ahead
    assert busy[order[0]] <= allowed or busy[order[0]] <= busy[order[1]]


def test_what_is_gone_is_forgotten(draw: random.Random) -> None:
    routing = PrefixRouting()
    routing.sent(PREFIX, "one")
    routing.sent(PREFIX[:3], "two")
    routing.keep_only(["two", "three"])
    assert routing.ranked(PREFIX, idle("one", "two", "three"), draw=draw)[0] == "two"
    routing.keep_only(["three"])
    firsts = {routing.ranked(PREFIX, idle("one", "two", "three"), draw=draw)[0] for _ in range(50)}
    assert firsts == {"one", "two", "three"}


def test_memory_is_bounded(draw: random.Random) -> None:
    routing = PrefixRouting(most_names=10)
    routing.sent(PREFIX, "one")
    for i in range(20):
        routing.sent([b"%d" % i], "two")
        routing.sent(PREFIX[:2], "one")
    known = [
        {routing.ranked([b"%d" % i], idle("one", "two"), draw=draw)[0] for _ in range(50)}
        for i in range(20)
    ]
    assert known == [{"one", "two"}] * 12 + [{"two"}] * 8
    assert routing.ranked(PREFIX[:2], idle("one", "two"), draw=draw)[0] == "one"


@pytest.mark.parametrize("wrong", [{"most_ahead": -1}, {"least_share": 2.0}, {"most_names": 0}])
def test_bad_limits(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        PrefixRouting(**wrong)
