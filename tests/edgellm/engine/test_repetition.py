from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.answer import loops, shortest_period
from edgellm.llm import LLM


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_shortest_period(tokens: list[int]) -> None:
    periods = [
        p
        for p in range(1, len(tokens) + 1)
        if all(tokens[i] == tokens[i - p] for i in range(p, len(tokens)))
    ]
    assert shortest_period(tokens) == min(periods)


def test_a_loop_is_noticed_once_it_is_long_enough() -> None:
    for period, expected in ((1, True), (16, True), (17, False), (64, False)):
        tokens = [*range(1000, 1048), *(list(range(period)) * 64)[:64]]
        assert loops(tokens, 64) == expected, period
    assert not loops([5] * 63, 64)
    assert not loops([5] * 6400, 0)


def test_an_endless_answer_ends_and_says_why(chosen_llm: LLM) -> None:
    prompt = "0 1 0 1 " * 30
    limits = {"temperature": 0.0, "repetition_limit": 64}
    answer = chosen_llm.generate(prompt, **limits)
    assert answer.finish_reason == "repetition"
    assert len(answer.tokens) < 400
    # who asks for a number of tokens gets them
    limits["max_tokens"] = len(answer.tokens) + 9
    for more in ({}, {"ignore_eos": True}):
        assert chosen_llm.generate(prompt, **limits, **more).finish_reason == "length"
