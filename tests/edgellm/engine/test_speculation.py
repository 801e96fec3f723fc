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

from edgellm.engine.speculation import DraftPolicy, PromptLookup, Speculation
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
        (COPY, "greedy"),
        (COPY, "stop"),
        (PLAIN, "sampled"),
        pytest.param(COPY, "sampled", marks=pytest.mark.slow),
        pytest.param(PLAIN, "greedy", marks=pytest.mark.slow),
        pytest.param(PLAIN, "stop", marks=pytest.mark.slow),
    ],
)
def test_the_answer_is_the_same(native: LLM, prompt: str, kind: str) -> None:
    with_drafts, without = (
        native.generate(
            prompt, max_tokens=80, ignore_eos=True, speculate=speculate, **OPTIONS[kind]
        )
        for speculate in (True, False)
    )
    assert with_drafts.tokens == without.tokens
    assert with_drafts.logprobs == without.logprobs
    assert with_drafts.text == without.text
    assert with_drafts.finish_reason == without.finish_reason
    assert without.stats.drafted_tokens == 0


def test_copying_is_foreseen(native: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step takes a second, drafted or not."""
    computed = Speculation.computed
    monkeypatch.setattr(Speculation, "computed", lambda *given, **_: computed(*given, seconds=1.0))
    found = native.generate(COPY, temperature=0, max_tokens=60, ignore_eos=True).stats
    assert found.accepted_tokens > found.drafted_tokens / 2 > 0


@pytest.mark.parametrize(
    "taken", [3, 9, *(pytest.param(count, marks=pytest.mark.slow) for count in (8, 10, 17))]
)
@pytest.mark.parametrize("ahead", [True, False])
def test_a_session_goes_on_where_it_was_left(
    native: LLM, taken: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is dropped in the middle of a draft, and then another one."""
    if not ahead:
        step_in_readers(native, monkeypatch)
    options = native.generation_options(temperature=0, max_tokens=40, ignore_eos=True)
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
    answer = session.stream(temperature=0, max_tokens=40, ignore_eos=True)
    list(itertools.islice(answer, 3))
    session.close() if change == "close" else session.rewind(5)
    answer.close()
    assert session.cached <= len(session.tokens) == (0 if change == "close" else 5)
    session.close()


def test_wrong_drafts_leave_no_trace(native: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
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


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_draft_stood_there_before(tokens: list[int]) -> None:
    lookup = PromptLookup(tokens)
    at, length = lookup.match()
    earlier = [i for i in range(3, len(tokens)) if tokens[i - 3 : i] == tokens[-3:]]
    assert bool(length) == bool(earlier)
    if length:
        assert at < len(tokens)
        assert tokens[at - length : at] == tokens[-length:]
        assert length == at or tokens[at - length - 1] != tokens[-length - 1]
        following = lookup.following(at, 70)
        whole = tokens + following  # what repeats goes on
        assert following == whole[at : at + 70]


def test_the_longer_match_is_taken() -> None:
    file, other = list(range(20)), [99, 17, 18, 19, 98]
    at, length = PromptLookup([*file, 50, 51, *other, *file]).match()
    assert (at, length) == (20, 20)
    at, length = PromptLookup([*file[:12], 50, 51, 9, 10, 11, 77, *file[:12]]).match()
    assert (at, length) == (12, 12)


def test_tokens_of_the_same_hash_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "_key", lambda *_: 0)
    assert PromptLookup([1, 2, 3, 4, 5, 6, 7, 8]).match() == (8, 0)


def test_long_matches_lead_to_long_drafts() -> None:
    policy = DraftPolicy()
    assert policy.length(64) == 0  # until it is known what a plain step takes
    policy.plain(1.0)
    lengths = [policy.length(match) for match in (0, 3, 4, 8, 16, 32, 64)]
    assert lengths[0] == 0 < lengths[1] <= 3
    assert lengths == sorted(lengths)
    assert lengths[-1] >= 31


def test_drafts_rest_when_they_do_not_pay() -> None:
    """Where each draft is wrong, a step in ten is one; where it is right again, more are."""
    policy = DraftPolicy()
    policy.plain(1.0)

    def drafts(steps: int, *, right: bool) -> int:
        count = 0
        for _ in range(steps):
            length = policy.length(3)
            count += length > 0
            if length:
                seconds = 1 + length / 12
                policy.drafted(seconds, match=3, drafted=length, accepted=length if right else 0)
        return count

    drafts(100, right=False)
    assert drafts(100, right=False) <= 10
    assert drafts(400, right=True) > 200


def test_slow_steps_make_drafts_short() -> None:
    policy = DraftPolicy()
    policy.plain(1.0)
    longest = policy.length(64)
    for _ in range(30):
        length = policy.length(64)
        policy.drafted(float(length), match=64, drafted=length, accepted=length)
    assert 0 < policy.length(64) < longest


def test_a_hiccup_is_forgotten() -> None:
    policy = DraftPolicy()
    policy.plain(1.0)
    for length in (1, 3, 7, 15, 31, 63):
        policy.drafted(500.0, match=64, drafted=length, accepted=length)
    assert any(policy.length(64) for _ in range(1000))


def test_a_draft_that_was_cut_counts_as_its_size() -> None:
    policy = DraftPolicy()
    policy.plain(1.0)
    for _ in range(30):
        policy.drafted(40.0, match=64, drafted=20, accepted=20)
    assert policy.length(64) != 31


@given(
    text=st.lists(st.integers(0, 2), min_size=60, max_size=60),
    prompt=st.integers(0, 20),
)
def test_rows_belong_to_their_tokens(text: list[int], prompt: int) -> None:
    """A model that goes on with `text` whatever happens: each row says where it was computed."""
    computed, speculation = list(text[:prompt]), Speculation(50)
    ahead: Logits | None = None
    for at in range(prompt, len(text)):
        if ahead is None:
            del computed[len(computed) - speculation.settle() :]
            rows = []
            draft = speculation.draft(len(text) - at - 1, text[: at + 1])
            for token in (text[at], *draft):
                computed.append(token)
                rows.append(Logits(np.array([len(computed), sum(computed)], np.float32), 0.0))
            speculation.computed(rows[1:], seconds=1.0)
            ahead = rows[0]
        assert ahead.scores.tolist() == [at + 1, sum(text[: at + 1])]
        assert len(computed) <= len(text)
        ahead = speculation.after(text[at + 1]) if at + 1 < len(text) else None
    assert computed[: len(text)] == text
