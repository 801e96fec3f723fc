"""Drafts change how fast an answer comes, and nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspection import draft_always, step_in_readers
from loops import alone, together, tokens_of

from edgellm.engine.draft_policy import DraftPolicy, common_length
from edgellm.engine.prompt_lookup import LookupDrafter
from edgellm.engine.speculation import Speculation
from edgellm.kernels.native import library
from edgellm.kernels.sampling import Logits
from edgellm.llm import LLM, load

COPY = (
    "def area(width, height):\n    return width * height\n\n"
    "def perimeter(width, height):\n    return 2 * (width + height)\n\n"
) * 2
PLAIN = "The three laws of motion were described by"


@pytest.fixture(scope="module")
def native(chosen_llm: LLM) -> LLM:
    if not chosen_llm.engine.decoder.exact_rows:
        pytest.skip("drafts need the native kernels")
    return chosen_llm


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 5, "repeat_penalty": 1.1},
    "stop": {"temperature": 0, "stop": ["return 2"], "logprobs": 2},
}


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (COPY, "stop"),
        (PLAIN, "sampled"),
        pytest.param(COPY, "greedy", marks=pytest.mark.slow),
        pytest.param(COPY, "sampled", marks=pytest.mark.slow),
        pytest.param(PLAIN, "greedy", marks=pytest.mark.slow),
        pytest.param(PLAIN, "stop", marks=pytest.mark.slow),
    ],
)
def test_the_answer_is_the_same(native: LLM, prompt: str, kind: str) -> None:
    with_drafts, without = (
        native.generate(
            prompt, max_tokens=40, ignore_eos=True, speculate=speculate, **OPTIONS[kind]
        )
        for speculate in (True, False)
    )
    assert with_drafts.tokens == without.tokens
    assert with_drafts.logprobs == without.logprobs
    assert with_drafts.text == without.text
    assert with_drafts.finish_reason == without.finish_reason
    assert without.stats.drafted_tokens == 0


def steps_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = Speculation.computed

    def second(self: Speculation, logits: Any, *, seconds: float | None, company: int) -> None:
        computed(self, logits, seconds=None if seconds is None else 1.0, company=company)

    monkeypatch.setattr(Speculation, "computed", second)


def test_copying_is_foreseen(native: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step takes a second, drafted or not."""
    steps_of_a_second(monkeypatch)
    found = native.generate(COPY, temperature=0, max_tokens=30, ignore_eos=True).stats
    assert found.accepted_tokens > found.drafted_tokens / 2 > 0


@pytest.mark.slow
def test_a_few_answers_at_once_draft_together(native: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    calls = [(native.tokenize(f"{i}\n{COPY}"), options) for i in range(5)]
    plain = [(tokens, {**options, "speculate": False}) for tokens, _ in calls]
    expected = tokens_of(alone(native, plain))
    steps_of_a_second(monkeypatch)
    for count in (4, 5):
        found = together(native, calls[:count])
        assert tokens_of(found) == expected[:count]
        accepted = [answer.stats.accepted_tokens for answer in found]
        assert all(accepted) if count == 4 else not any(accepted)


def test_none_drafts_where_one_of_them_would_only_wait(
    native: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_of_a_second(monkeypatch)
    options = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    copy, plain = native.tokenize(COPY), native.tokenize(PLAIN)
    found = together(native, [(copy, options), (plain, {**options, "speculate": False})])
    assert [answer.stats.drafted_tokens for answer in found] == [0, 0]


@pytest.mark.parametrize(
    ("taken", "ahead"),
    [
        (9, True),
        (3, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((8, True), (17, False))),
    ],
)
def test_a_session_goes_on_where_it_was_left(
    native: LLM, taken: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is dropped in the middle of a draft, and then another one."""
    if not ahead:
        step_in_readers(native, monkeypatch)
    options = native.generation_options(temperature=0, max_tokens=24, ignore_eos=True)
    with native.session() as session, native.session() as plain:
        for s in (session, plain):
            s.append(COPY)
        list(itertools.islice(session.stream(options=options), taken))
        assert session.cached <= len(session.tokens)
        again = session.generate(options=options).tokens
        plain.replace(session.tokens[: -len(again)])
        assert plain.generate(options=options, speculate=False).tokens == again


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("change", ["close", "rewind"])
def test_a_session_that_changes_under_an_answer(
    native: LLM, change: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone holds the answer, a wrong draft on its way, and goes back behind it."""
    if not ahead:
        step_in_readers(native, monkeypatch)
    draft_always(monkeypatch, [7, 8])
    session = native.session()
    session.append(COPY)
    answer = session.stream(temperature=0, max_tokens=20, ignore_eos=True)
    list(itertools.islice(answer, 3))
    session.close() if change == "close" else session.rewind(5)
    answer.close()
    assert session.cached <= len(session.tokens) == (0 if change == "close" else 5)
    session.close()


@pytest.mark.slow
def test_wrong_drafts_leave_no_trace(native: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    expected = native.generate(PLAIN, speculate=False, **options).tokens
    draft_always(monkeypatch, [7, 8])
    with native.session() as session:
        session.append(PLAIN)
        found = session.generate(**options)
        assert found.tokens == expected
        assert found.stats.drafted_tokens > 0
        assert session.cached <= len(session.tokens)


def test_the_end_of_the_context(native: LLM) -> None:
    llm = load(str(native.engine.bundle.path), ctx_size=140)
    tokens = llm.engine.tokenizer.encode(COPY)
    found = llm.generate(COPY, temperature=0, ignore_eos=True)
    assert found.finish_reason == "length"
    assert len(found.tokens) == 140 - len(tokens) + 1


@pytest.mark.skipif(library() is None, reason="native drafts need the native kernels")
def test_portable_back_ends_draft_nothing(tiny_model: Path) -> None:
    drafted = []
    for options in ({"decode": "native"}, {"prefill": "cpu", "decode": "portable"}):
        llm = load(str(tiny_model), **options)  # type: ignore[arg-type]
        answer = llm.generate(COPY, temperature=0, max_tokens=60, ignore_eos=True)
        drafted.append(answer.stats.drafted_tokens)
    assert drafted[0] > drafted[1] == 0


@given(
    text=st.lists(st.integers(0, 2), min_size=60, max_size=60),
    prompt=st.integers(0, 20),
)
def test_rows_belong_to_their_tokens(text: list[int], prompt: int) -> None:
    """A model that goes on with `text` whatever happens: each row says where it was computed."""
    computed = list(text[:prompt])
    speculation = Speculation([LookupDrafter(50)], DraftPolicy())
    ahead: Logits | None = None
    for at in range(prompt, len(text)):
        if ahead is None:
            del computed[len(computed) - speculation.settle() :]
            rows = []
            choice = speculation.choose(len(text) - at - 1, text[: at + 1], company=1)
            draft = speculation.draft(common_length([choice]), text[: at + 1])
            for token in (text[at], *draft):
                computed.append(token)
                rows.append(Logits(np.array([len(computed), sum(computed)], np.float32), 0.0))
            speculation.computed(rows[1:], seconds=1.0)
            ahead = rows[0]
        assert ahead.scores.tolist() == [at + 1, sum(text[: at + 1])]
        assert len(computed) <= len(text)
        ahead = speculation.after(text[at + 1]) if at + 1 < len(text) else None
    assert computed[: len(text)] == text
