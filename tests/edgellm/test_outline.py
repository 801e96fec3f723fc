"""Outlines: a list of points, and the points written together from one prefix."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import used_blocks
from numpy.typing import NDArray

from edgellm import Completion, ContextOverflowError, GenerationOptions, OptionError, Progress
from edgellm.backends.batch import Rows, Span
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.outline import _POINT, _SKELETON, Outline, _titles

GREEDY = GenerationOptions(temperature=0, max_tokens=100, repeat_penalty=1.0, speculate=False)
QUESTION = "why " * 30
TITLES = ["red hat", "green", "blue sea"]
LISTED = "It is:\n1. **red hat**:\n- of these\n 2) green\n**3. blue sea**.\n4.\n2) green\nno more"
Filter = Callable[[NDArray[np.float32], Sequence[int]], None]


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return load(str(tiny_model), ctx_size=8 * BLOCK, cache_size=64 * BLOCK)


def listing(llm: LLM, text: str = LISTED) -> Filter:
    """Make the first answer `text`, and leave those behind it as they are."""
    left = [*llm.tokenize(text), min(llm.engine.tokenizer.eos_ids)]
    left.reverse()

    def force(scores: NDArray[np.float32], tokens: Sequence[int]) -> None:
        if left:
            scores[np.arange(len(scores)) != left.pop()] = -np.inf

    return force


def outlined(llm: LLM, text: str = LISTED, *, max_points: int = 10) -> Outline:
    return llm.outline(
        QUESTION, options=GREEDY, logit_filter=listing(llm, text), max_points=max_points
    )


def asked_alone(llm: LLM, titles: Sequence[str]) -> list[Completion]:
    lines = "\n".join(f"{number}. {title}" for number, title in enumerate(titles, 1))
    answers = []
    for title in titles:
        text = _POINT.format(question=QUESTION, outline=lines, title=title)
        with llm.chat(temperature=0, max_tokens=100, repeat_penalty=1.0) as chat:
            answers.append(chat.send(text))
    return answers


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_points_are_those_that_are_asked_for_alone(llm: LLM, system: str | None) -> None:
    llm.system = system
    found = outlined(llm)
    fresh = load(str(llm.engine.bundle.path), ctx_size=8 * BLOCK, system=system)
    alone = asked_alone(fresh, TITLES)
    assert found.skeleton.text == LISTED
    assert [point.title for point in found.points] == TITLES
    assert [point.completion.tokens for point in found.points] == [each.tokens for each in alone]
    texts = [each.text.strip() for each in alone]
    lines = zip(TITLES, texts, strict=True)
    assert found.text == "\n".join(f"{i}. {t}: {x}" for i, (t, x) in enumerate(lines, 1))
    assert used_blocks(llm) == 0


def test_what_points_have_in_common_is_computed_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    run = llm.engine.decoder.run

    def counted(spans: Sequence[Span], **options: Any) -> list[Rows]:
        rows.extend(len(span.tokens) for span in spans)
        return run(spans, **options)

    monkeypatch.setattr(llm.engine.decoder, "run", counted)
    found = outlined(llm)
    answers = [found.skeleton, *(point.completion for point in found.points)]
    [common] = {each.stats.cached_tokens for each in answers[1:]}
    assert common % BLOCK
    sampled = sum(len(each.tokens) - 1 for each in answers)
    prompts = sum(each.stats.prompt_tokens - each.stats.cached_tokens for each in answers)
    assert sum(rows) <= common + prompts + sampled + len(answers)


def test_a_numbered_list_is_stopped_at_the_point_that_is_too_many(llm: LLM) -> None:
    found = outlined(llm, "1. one\n2. two\n3. three\n4. four", max_points=2)
    assert found.skeleton.text == "1. one\n2. two"
    assert [point.title for point in found.points] == ["one", "two"]


def test_of_a_long_list_the_first_points_are_written(llm: LLM) -> None:
    assert [point.title for point in outlined(llm, max_points=2).points] == TITLES[:2]
    assert [point.title for point in outlined(llm, max_points=1).points] == TITLES[:1]


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("- one\n* two \n  \u2022 _three_.", ["one", "two", "three"]),
        ("1.\n2. two\n3. __\n4) 4 of 5", ["two", "4 of 5"]),
        ("1.5 litres\n-5 degrees\nno list - at all", []),
    ],
)
def test_lists_are_read(text: str, titles: list[str]) -> None:
    assert _titles(text) == titles


def test_of_a_list_that_is_cut_the_last_point_is_left_out(llm: LLM) -> None:
    count = len(llm.tokenize(LISTED[: LISTED.index("blue") + 2]))
    found = llm.outline(
        QUESTION, options=GREEDY, max_tokens=count, logit_filter=listing(llm, LISTED)
    )
    assert found.skeleton.finish_reason == "length"
    assert [point.title for point in found.points] == TITLES[:2]


def test_the_model_is_asked_for_as_many_points_as_are_written(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    asked = llm._asked
    monkeypatch.setattr(llm, "_asked", lambda text: (seen.append(text), asked(text))[1])
    for most in (1, 2, 9):
        llm.outline("why", options=GREEDY, max_tokens=1, max_points=most)
    for text, expected in zip(seen, ("1 to 1", "2 to 2", "3 to 9"), strict=True):
        assert f": a numbered list of {expected} points" in text


def test_an_answer_that_is_no_list_is_the_text(llm: LLM) -> None:
    found = outlined(llm, "It is so.")
    assert found.points == ()
    assert found.text == "It is so."


def test_asyncio_answers_the_same(llm: LLM) -> None:
    async def run() -> Outline:
        return await llm.aoutline(QUESTION, options=GREEDY, logit_filter=listing(llm))

    found, expected = asyncio.run(run()), outlined(llm)
    assert found.text == expected.text
    assert used_blocks(llm) == 0


def test_an_outline_that_is_cancelled_ends_where_it_is(llm: LLM) -> None:
    cancel = threading.Event()
    force = listing(llm)

    def stop(scores: NDArray[np.float32], tokens: Sequence[int]) -> None:
        force(scores, tokens)
        if len(tokens) == 5:
            cancel.set()

    found = llm.outline(QUESTION, options=GREEDY, logit_filter=stop, cancel=cancel)
    assert found.skeleton.finish_reason == "cancelled"
    assert found.points == ()
    assert found.text
    assert LISTED.startswith(found.text)
    assert used_blocks(llm) == 0


def test_progress_is_of_points(llm: LLM) -> None:
    seen: list[Progress] = []
    llm.outline(QUESTION, options=GREEDY, logit_filter=listing(llm), progress=seen.append)
    assert [(each.label, each.done, each.total) for each in seen] == [
        ("answers", done, 3) for done in (1, 2, 3)
    ]


def test_what_is_wrong_is_said(llm: LLM) -> None:
    with pytest.raises(OptionError, match="`question`"):
        llm.outline(7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`question` is empty"):
        llm.outline(" ")
    with pytest.raises(OptionError, match="`max_points` is 0"):
        llm.outline("why", max_points=0)
    with pytest.raises(OptionError, match="`grammar`: the list of points"):
        llm.outline("why", grammar='root ::= "a"')
    with pytest.raises(ContextOverflowError):
        llm.outline("why " * 12 * BLOCK)
    assert used_blocks(llm) == 0


def test_a_point_that_does_not_fit_holds_nothing(llm: LLM) -> None:
    listed = f"1. {'red' * 20}\n2. {'blue' * 15}"
    letters = llm.ctx_size - 160 - llm.count_tokens(_SKELETON)
    question = "w" * (letters * 1000 // llm.count_tokens("w" * 1000))
    with pytest.raises(ContextOverflowError) as error:
        llm.outline(question, options=GREEDY, max_tokens=150, logit_filter=listing(llm, listed))
    assert used_blocks(llm) == 0  # while the error is there
    assert "the prompt has" in str(error.value)


def failing(llm: LLM) -> Filter:
    force = listing(llm)

    def fail(scores: NDArray[np.float32], tokens: Sequence[int]) -> None:
        force(scores, tokens)
        if not np.isneginf(scores).any() and len(tokens) == 3:
            raise ZeroDivisionError

    return fail


def test_an_error_in_a_point_is_raised_and_nothing_stays(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError):
        llm.outline(QUESTION, options=GREEDY, logit_filter=failing(llm))
    assert used_blocks(llm) == 0
    assert outlined(llm).points
