"""Prompts of any length in a context that shifts: an answer keeps no more than a context holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_without_model import ask, finish, start, step, tokens

from edgellm.engine.prompt_lookup import PromptLookup
from edgellm.generation_options import GenerationOptions

CTX = 256
SHIFT = GenerationOptions(
    temperature=0, max_tokens=40, context_policy="shift", keep=5, repetition_limit=0
)


class Lookups:
    """Lookups that were made, by how many tokens they were made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        monkeypatch.setattr("edgellm.engine.prompt_lookup.PromptLookup", self.make)

    def make(self, known: list[int]) -> PromptLookup:
        self.sizes.append(len(known))
        return PromptLookup(known)


def test_what_a_shift_forgets_is_forgotten_for_all_answers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups = Lookups(monkeypatch)
    llm, prompt = start(CTX, blocks=20), tokens(1, 50_000)
    answers = ask(llm, prompt, n=6, options=SHIFT)
    assert lookups.sizes == []
    kept = [*prompt[:5], *prompt[-((CTX - 5) // 2) :]]
    assert [answer.context.tokens for answer in answers] == [kept] * 6
    finish(llm, answers)
    stats = [answer.stats() for answer in answers]
    assert [each.prompt_tokens for each in stats] == [50_000] * 6
    assert [each.dropped_tokens for each in stats] == [50_000 - len(kept)] * 6
    assert lookups.sizes == []  # too many were on their way at once


def test_drafts_are_looked_up_in_a_context_s_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the end of an answer of many contexts."""
    lookups = Lookups(monkeypatch)
    llm = start(CTX, blocks=20)
    prompt = tokens(1, 200)
    answers = ask(llm, prompt, options=replace(SHIFT, max_tokens=2000))
    step(llm, answers)
    assert lookups.sizes == []
    finish(llm, answers)
    assert len(lookups.sizes) > 2
    assert max(lookups.sizes) <= CTX
