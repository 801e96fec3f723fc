"""Logit filters: in place, or by what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from loop_checks import GREEDY, prompt

from edgellm.engine.chat_prompt import AllFilters
from edgellm.errors import OptionError
from edgellm.llm import LLM

Scores = np.ndarray


def banned(best: int) -> Callable[[Scores, Sequence[int]], Scores]:
    def ban(scores: Scores, tokens: Sequence[int]) -> Scores:
        new = scores.copy()
        new[best] = -np.inf
        return new

    return ban


def test_returned_scores_count_as_those_changed_in_place(tiny: LLM) -> None:
    """Filters of other libraries all return scores."""
    options = {**GREEDY, "max_tokens": 4}
    (first, *_) = tiny.generate(prompt(1, 20), **options).tokens
    ban = banned(first)

    def in_place(scores: Scores, tokens: Sequence[int]) -> None:
        scores[first] = -np.inf

    def twice_as_wide(scores: Scores, tokens: Sequence[int]) -> Scores:
        return ban(scores, tokens).astype(np.float64)

    def same_array(scores: Scores, tokens: Sequence[int]) -> Scores:
        in_place(scores, tokens)
        return scores

    answers = [
        tiny.generate(prompt(1, 20), logit_filter=each, **options).tokens
        for each in (in_place, ban, twice_as_wide, same_array)
    ]
    assert first not in answers[0]
    assert answers == [answers[0]] * 4


def test_one_filter_goes_on_with_what_another_returned(tiny: LLM) -> None:
    """And leaves the array alone, which the first one may keep."""
    kept = np.zeros(320, np.float32)
    kept[[7, 9]] = 3, 5

    def keep(scores: Scores, tokens: Sequence[int]) -> Scores:
        return kept

    def ban(scores: Scores, tokens: Sequence[int]) -> None:
        scores[9] = -np.inf

    both = AllFilters(keep, ban)
    assert tiny.generate([5], logit_filter=both, max_tokens=3, **GREEDY).tokens == (7, 7, 7)
    assert kept[9] == 5


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ([1, 2], "list"),
        (np.zeros(7, np.float32), r"ndarray \(7,\)"),
        (np.zeros(320, np.int64), "floats"),
        (True, "bool"),
    ],
    ids=["list", "shape", "integers", "bool"],
)
def test_anything_else_that_is_returned_is_an_error(tiny: LLM, returned: Any, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        tiny.generate([5], max_tokens=1, logit_filter=lambda *_: returned)


@pytest.mark.parametrize("name", ["stop_tokens", "logit_bias"])
@pytest.mark.parametrize("options", [{"min_tokens": 3}, {"ignore_eos": True}], ids=str)
def test_tokens_that_are_not_in_the_vocabulary_are_refused_before_the_first_step(
    tiny: LLM, name: str, options: dict[str, Any]
) -> None:
    """Also where all scores are looked at, and a place beyond them is no place."""
    wrong = [320] if name == "stop_tokens" else {320: 1.0}
    steps = tiny.engine.loop.counts.steps
    for n in (None, 2):
        with pytest.raises(OptionError, match=rf"{name}.*320 is not in the vocabulary"):
            tiny.generate([5], n=n, top_k=0, max_tokens=5, **{name: wrong}, **options)
    assert tiny.engine.loop.counts.steps == steps


def test_seeds_of_several_answers_begin_again_behind_the_largest(tiny: LLM) -> None:
    answers = tiny.generate([5, 6], n=3, seed=2**64 - 2, max_tokens=2)
    assert [answer.stats.seed for answer in answers] == [2**64 - 2, 2**64 - 1, 0]
