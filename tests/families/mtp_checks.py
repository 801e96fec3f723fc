"""What tests of drafts by heads share: those of a model's own, and Gemma 4's assistant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from inspection import draft_with, preempt_at, used_blocks

from edgellm.llm import LLM

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
SAMPLED = GREEDY | {"temperature": 0.9, "seed": 5}


def watch_drafts(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[tuple[list[int], list[int]]]:
    """Texts that a kind of drafter is asked to go on with, and its drafts, as they come."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = kind.propose

    def noting(self: Any, tokens: Sequence[int], count: int) -> list[int]:
        draft = propose(self, tokens, count)
        seen.append((list(tokens), draft))
        return draft

    monkeypatch.setattr(kind, "propose", noting)
    draft_with(monkeypatch, "mtp")
    return seen


def check_same(llm: LLM, tokens: Sequence[int], options: dict[str, Any]) -> None:
    """Answers with drafts and without, one after the other and together."""
    prompts = [tokens[i : i + length] for i, length in enumerate((2, 100, 260))]
    plain = [llm.generate(each, **options, speculate=False) for each in prompts]
    with pytest.MonkeyPatch.context() as patch:
        draft_with(patch, "mtp")
        for prompt, expected in zip(prompts, plain, strict=True):
            found = llm.generate(prompt, **options)
            assert found.tokens == expected.tokens
            assert found.logprobs == expected.logprobs
            assert found.stats.draft_failure == ""
            assert found.stats.drafts["mtp"].drafted > 10
        together = {a.index: a.result() for a in llm.batch(prompts, **options)}
    assert [together[i].tokens for i in range(3)] == [each.tokens for each in plain]
    assert used_blocks(llm) == 0


def check_preempted_and_shifting(
    llm: LLM, tokens: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer whose hidden states are computed again, or are not those of the same tokens."""
    shift = GREEDY | {"max_tokens": 300, "context_policy": "shift", "keep": 3}
    shift["repetition_limit"] = 0
    expected = llm.generate(tokens, speculate=False, **shift)
    draft_with(monkeypatch, "mtp")
    preempt_at(llm, monkeypatch, lambda step: step == 20)
    found = llm.generate(tokens, **shift)
    assert found.stats.preempted == 1
    assert found.stats.dropped_tokens > 0
    assert found.tokens == expected.tokens
    counts = found.stats.drafts["mtp"]
    assert counts.accepted > 0.8 * counts.drafted > 150
    assert used_blocks(llm) == 0
