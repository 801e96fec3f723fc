"""Answers of a model with a layer of fixed-size state, whose every token tells the state apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_without_model import (
    GREEDY,
    VOCABULARY,
    StateBackend,
    ask,
    finish,
    folded,
    start,
    step,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from inspection import draft_as, used_blocks

from edgellm.backends.batch import Rows, Span
from edgellm.cache.groups import DRAFT_STATES, pool_blocks
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.draft_model import DraftModel
from edgellm.engine.request import Request
from edgellm.generation_options import GenerationOptions, Shift
from edgellm.kernels.kv_blocks import BLOCK

CTX = 512


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """Prompt and answer by the definition of the model."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(folded(text)) % VOCABULARY)
    return text


@settings(deadline=None, max_examples=4)
@given(
    asks=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.integers(1, 300),
            st.integers(1, 3),
            st.integers(1, 150),
            st.integers(0, 60),
        ),
        min_size=1,
        max_size=4,
    ),
    more=st.integers(0, 6),
    kind=st.sampled_from([{}, {"exact": False}, {"apart": True}, {"scheduling": "serial"}]),
)
def test_answers_in_small_caches(
    asks: list[tuple[int, int, int, int, int]], more: int, kind: dict[str, Any]
) -> None:
    """Prompts share beginnings, answers fork, and those without room are preempted."""
    llm = start(CTX, blocks=pool_blocks(CTX) + more, states=True, **kind)
    requests: list[Request] = []
    expected = []
    for seed, length, n, max_tokens, steps in asks:
        prompt = tokens(seed, 300)[:length]
        requests += ask(llm, prompt, n=n, max_tokens=max_tokens)
        expected += [answer(prompt, max_tokens)] * n
        for _ in range(steps):
            step(llm, requests)
    finish(llm, requests)
    assert [request.context.tokens for request in requests] == expected


@pytest.mark.parametrize("exact", [True, False])
def test_preempted_answers_go_on_from_the_same_state(exact: bool) -> None:
    llm = start(CTX, blocks=5, states=True, exact=exact)
    (long,) = ask(llm, tokens(0, 200), max_tokens=100)
    step(llm, [long])
    requests = [long, *ask(llm, tokens(1, 200), n=3, max_tokens=70)]
    finish(llm, requests)
    assert any(request.stats().preempted for request in requests)
    texts = [request.context.tokens for request in requests]
    assert texts == [answer(tokens(0, 200), 100), *[answer(tokens(1, 200), 70)] * 3]


def test_a_later_prompt_begins_at_the_end_of_a_full_block() -> None:
    llm = start(CTX, blocks=20, states=True)
    finish(llm, ask(llm, tokens(0, 300), max_tokens=3))
    cached = []
    for prompt in (tokens(0, 300), answer(tokens(0, 300), 3), tokens(0, 200) + tokens(1, 90)):
        (request,) = ask(llm, prompt, max_tokens=3)
        finish(llm, [request])
        assert request.context.tokens == answer(prompt, 3)
        cached.append(request.stats().cached_tokens)
    assert cached == [2 * BLOCK, 302, BLOCK]


def foresee(monkeypatch: pytest.MonkeyPatch, right: Sequence[int]) -> None:
    """Drafts of which so many tokens are right, in turn, and the others wrong."""
    turns = itertools.cycle(right)

    def guess(tokens: Sequence[int]) -> list[int]:
        known, text = next(turns), answer(tokens, 63)[len(tokens) :]
        return [*text[:known], *((token + 1) % VOCABULARY for token in text[known:])]

    draft_as(monkeypatch, guess)


@pytest.mark.parametrize("right", [[0], [7], [3], [0, 5, 7, 1]], ids=str)
def test_drafts_change_no_answer(right: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is computed twice, and states take as many blocks as the bound says."""
    foresee(monkeypatch, right)
    llm = start(CTX, blocks=20, states=True, drafts=True)
    most = []
    (request,) = ask(llm, tokens(0, 120), max_tokens=150)
    run = llm.engine.decoder.run

    def watched(spans: Sequence[Span], **options: Any) -> list[Rows]:
        rows: list[Rows] = run(spans, **options)
        most.append(llm.engine.cache.groups[1].pool.used)
        return rows

    llm.engine.decoder.run = watched
    finish(llm, [request])
    assert request.context.tokens == answer(tokens(0, 120), 150)
    stats = request.stats()
    share = sum(right) / (7 * len(right))
    assert stats.accepted_tokens == pytest.approx(share * stats.drafted_tokens, rel=0.1)
    assert stats.drafted_tokens > 100
    # the prompt's step gives a token as well; the last one of the answer may have been drafted
    assert len(most) - (150 - stats.accepted_tokens) in (0, 1)
    assert max(most) <= 3 + DRAFT_STATES


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_few_answers_share_the_room_for_drafts(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    foresee(monkeypatch, [0, 1, 2])
    llm = start(CTX, blocks=30, states=True, drafts=True)
    requests = [r for i in range(count) for r in ask(llm, tokens(i, 60 + i), max_tokens=100)]
    finish(llm, requests)
    for i, request in enumerate(requests):
        assert request.context.tokens == answer(tokens(i, 60 + i), 100)
        assert request.stats().drafted_tokens > 0


def test_a_draft_model_with_states_computes_nothing_twice() -> None:
    """However many of its guesses were right, it goes on behind them."""
    llm, backend, rows = start(CTX, blocks=20, states=True, drafts=True), StateBackend(), []
    run = backend.run

    def counted(spans: Sequence[Span], **options: Any) -> list[Rows]:
        rows.append(len(spans[0].tokens))
        return run(spans, **options)

    backend.run = counted  # type: ignore[method-assign]
    model = DraftModel(
        decoder=backend,
        cache=llm.engine.cache,
        ctx_size=CTX,
        rows=VOCABULARY,
        tokens=5,
        p_min=0,
        token_steps=0.4,
    )
    drafter, text, behind = model.drafter(""), tokens(0, 60), 60
    for right in (5, 0, 3, 4, 1, 5, 5, 2) * 6:
        evidence = drafter.evidence(text)
        assert evidence is not None
        assert evidence.behind == behind
        draft = drafter.propose(text, 5)
        assert draft == answer(text, 5)[len(text) :]
        assert rows == [behind, 1, 1, 1, 1]
        rows.clear()
        text += [*draft[:right], (draft[right] + 1) % VOCABULARY if right < 5 else 7]
        behind = 2 if right == 5 else 1
    drafter.close()
    assert used_blocks(llm) == 0


def test_drafts_take_no_blocks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the states of others leave no room, there are none."""
    foresee(monkeypatch, [7])
    llm = start(CTX, blocks=8, states=True, drafts=True)
    pool = llm.engine.cache.groups[1].pool
    held = [pool.allocate() for _ in range(pool.available - 3)]
    (request,) = ask(llm, tokens(0, 60), max_tokens=50)
    while not request.finished:
        step(llm, [request])
    assert request.context.tokens == answer(tokens(0, 60), 50)
    assert 0 < request.stats().drafted_tokens < 30  # one a step, where two blocks were free
    for block in held:
        pool.release(block)
    assert used_blocks(llm) == 0


def test_a_full_context_forgets_tokens_and_computes_the_others_again() -> None:
    shift = GenerationOptions(
        temperature=0, max_tokens=600, context_policy="shift", keep=5, repetition_limit=0
    )
    llm = start(256, blocks=20, states=True)
    (request,) = ask(llm, tokens(1, 200), options=shift)
    finish(llm, [request])
    text, whole = tokens(1, 200), []
    for _ in range(600):
        if len(text) > 256:
            count = Shift().forgotten(len(text), ctx_size=256, keep=5)
            text = text[:5] + text[5 + count :]
        text.append(int(folded(text)) % VOCABULARY)
        whole.append(text[-1])
    assert request.stats().dropped_tokens > 300
    assert request.context.tokens == text
    assert used_blocks(llm) == 0


def answered(llm: Any, context: Context, count: int) -> None:
    """The next answer of a session, which is the model's."""
    expected = answer(context.tokens, count)
    request = Request(context, Call(options=replace(GREEDY, max_tokens=count)))
    llm.engine.loop.submit(request)
    while not request.finished:
        step(llm, [request])
    assert request.error is None
    assert context.tokens == expected


@pytest.mark.parametrize("right", [None, [0], [2, 7, 0]], ids=str)
def test_a_session_is_rewound_forked_and_saved(
    right: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if right is not None:
        foresee(monkeypatch, right)

    def named() -> Any:
        llm = start(CTX, blocks=40, states=True, drafts=right is not None)
        llm.engine.bundle = SimpleNamespace(manifest=SimpleNamespace(name="states"))
        llm.engine.fingerprint, llm.engine.arithmetic = "f", "a"
        return llm

    llm = named()
    session = Context(llm.engine, tokens(0, 150))
    answered(llm, session, 60)
    assert session.cached in (209, 210)  # the last one where it was drafted
    for length in (205, 140, 100):  # within a block, just behind its end, before it
        session.set(session.tokens[:length])
        answered(llm, session, 70)
    fork = session.fork()
    session.set([*session.tokens, *tokens(1, 20)])
    answered(llm, session, 30)
    answered(llm, fork, 30)
    fork.save(tmp_path / "saved")
    other = named()
    restored = Context(other.engine)
    restored.restore(tmp_path / "saved")
    assert restored.tokens == fork.tokens
    answered(other, restored, 40)
    for each in (session, fork):
        each.close()
    step(llm, [])
    assert used_blocks(llm) == 0


@pytest.mark.parametrize("length", [1, 100, 128, 200, 256])
def test_a_step_that_fails_leaves_the_states_of_others_and_its_own(length: int) -> None:
    """What is asked again after it has the same answer."""
    llm = start(CTX, blocks=40, states=True)
    run = llm.engine.prefill.run

    def fails(spans: Sequence[Span], **options: Any) -> list[Rows]:
        for span in spans:
            with span.sequence.reserved(len(span.tokens)):
                StateBackend()._rows(span)
        raise RuntimeError("struck")

    (first,) = ask(llm, tokens(0, length), max_tokens=100)
    while len(first.context.tokens) < length + 5:
        step(llm, [first])
    kept = Context(llm.engine)
    llm.engine.thread.call(lambda: kept.become(first.context))
    llm.engine.prefill.run = fails
    step(llm, [first])
    assert first.error is not None
    llm.engine.prefill.run = run
    answered(llm, kept, 50)
    kept.close()
    (again,) = ask(llm, tokens(0, length), max_tokens=100)
    finish(llm, [again])
    assert again.context.tokens == answer(tokens(0, length), 100)


def test_rows_begin_where_a_sequence_goes_back_to() -> None:
    """A step that failed had computed the last token as well, whose logits are wanted."""
    llm = start(CTX, blocks=40, states=True)
    request = Request(Context(llm.engine, tokens(0, 200)), Call(options=GREEDY))

    def computed() -> Span:
        sequence = request.context.sequence
        with sequence.reserved(200):
            StateBackend()._rows(Span(sequence, request.tokens))
            sequence.commit(request.tokens)
        return request.span(200)

    span = llm.engine.thread.call(computed)
    assert span.tokens == tokens(0, 200)[len(span.sequence) :]
    assert len(span.sequence) == BLOCK


def test_states_are_poisoned_until_written() -> None:
    """Else the tests above could not tell."""
    llm = start(CTX, blocks=40, states=True)
    assert np.isnan(llm.engine.cache.groups[1].blocks.states).all()
