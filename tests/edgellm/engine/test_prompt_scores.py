"""Log-probabilities of a prompt's own tokens, against the logits after each of its beginnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import GenerationOptions, OptionError, TokenLogprob
from edgellm.engine.one_sequence import compute_tokens
from edgellm.engine.sampling import log_softmax
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

# Longer than a block, so that a second prompt finds a part of it in the cache.
PROMPT = [(7 * i * i + 3 * i + 5) % 300 for i in range(2 * BLOCK + 9)]


def expected(llm: LLM, prompt: list[int]) -> np.ndarray:
    """Log-probabilities `[tokens, V]` after each token, computed alone."""

    def rows() -> np.ndarray:
        sequence = llm.engine.cache.sequence()
        logits = compute_tokens(llm.engine.prefill, prompt, sequence)
        sequence.close()
        return logits

    return log_softmax(llm.engine.thread.call(rows))


def check(scored: tuple[TokenLogprob, ...], logprobs: np.ndarray, prompt: list[int]) -> None:
    assert [each.token for each in scored] == prompt
    assert (scored[0].logprob, scored[0].rank, scored[0].top) == (None, None, {})
    for after, each in zip(logprobs, scored[1:], strict=False):
        assert each.logprob == pytest.approx(after[each.token], abs=2e-4)
        assert each.rank == 1 + np.count_nonzero(after > after[each.token])
        assert list(each.top.values()) == sorted(each.top.values(), reverse=True)
        assert next(iter(each.top)) == int(after.argmax())
        if each.rank <= len(each.top):
            assert each.top[each.token] == each.logprob


@pytest.mark.parametrize("length", [1, 2, 70, len(PROMPT)])
def test_scores_are_those_of_the_logits(tiny: LLM, length: int) -> None:
    prompt = PROMPT[:length]
    answer = tiny.generate(prompt, max_tokens=0, prompt_logprobs=3)
    check(answer.prompt_logprobs, expected(tiny, prompt), prompt)
    assert answer.tokens == ()
    assert answer.finish_reason == "length"


def test_cached_prompts_are_scored_as_well(tiny: LLM) -> None:
    first = tiny.generate(PROMPT, max_tokens=4, temperature=0, prompt_logprobs=2)
    again = tiny.generate(PROMPT, max_tokens=4, temperature=0, prompt_logprobs=2)
    plain = tiny.generate(PROMPT, max_tokens=4, temperature=0)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert first.tokens == again.tokens == plain.tokens
    assert plain.prompt_logprobs == ()
    assert again.stats.cached_tokens == 0
    assert plain.stats.cached_tokens > BLOCK


def test_prompts_together_have_the_scores_that_each_has_alone(tiny: LLM) -> None:
    prompts = [PROMPT, PROMPT[: BLOCK + 5], [9, *PROMPT[:40]], PROMPT[:3]]
    alone = [tiny.generate(p, max_tokens=1, temperature=0, prompt_logprobs=1) for p in prompts]
    together = tiny.generate(prompts, max_tokens=1, temperature=0, prompt_logprobs=1)
    for one, answer in zip(alone, together, strict=True):
        assert answer.prompt_logprobs == one.prompt_logprobs


def test_a_prompt_that_loses_its_place_goes_on(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was scored before is not scored again, and what was not is computed again."""
    from edgellm.engine.request import Request

    llm = load(folder, ctx_size=4 * BLOCK, cache_size=8 * BLOCK)
    whole = llm.generate(PROMPT, max_tokens=2, temperature=0, prompt_logprobs=1)
    begin, takes, preempted = Request.begin, [], []

    def noted(self: Request, *arguments: Any, **options: Any) -> None:
        take(self, *arguments, **options)
        takes.append(self)
        if len(takes) == 1 and not self.finished:
            preempted.append(self)
            self.preempt()
            begin(self)

    take = Request.take
    monkeypatch.setattr(Request, "take", noted)
    monkeypatch.setattr("edgellm.engine.batcher._LONE_ROWS", 32)
    llm = load(folder, ctx_size=4 * BLOCK, cache_size=8 * BLOCK)
    answer = llm.generate(PROMPT, max_tokens=2, temperature=0, prompt_logprobs=1)
    assert preempted
    assert [each.token for each in answer.prompt_logprobs] == PROMPT
    for found, right in zip(answer.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert found.logprob == pytest.approx(right.logprob, abs=2e-4)


def test_a_session_that_is_computed_already(tiny: LLM) -> None:
    with tiny.session() as session:
        session.append(PROMPT)
        session.generate(max_tokens=0)
        found = session.generate(max_tokens=0, prompt_logprobs=1)
    check(found.prompt_logprobs, expected(tiny, PROMPT), PROMPT)


def test_answers_to_one_prompt_have_them_once(tiny: LLM) -> None:
    first, *others = tiny.generate([PROMPT], n=3, max_tokens=2, seed=1, prompt_logprobs=0)
    assert len(first.prompt_logprobs) == len(PROMPT)
    assert all(answer.prompt_logprobs == () for answer in others)


def test_chunks_score_as_native_steps_do(tiny_model: Path) -> None:
    """The back end of prefill computes the LM head, also where that is a graph."""
    chunked = load(str(tiny_model), ctx_size=4 * BLOCK, prefill="cpu", precision="f32")
    answer = chunked.generate(PROMPT, max_tokens=0, prompt_logprobs=1)
    check(answer.prompt_logprobs, expected(chunked, PROMPT), PROMPT)


def test_what_may_forget_the_prompt_is_refused() -> None:
    with pytest.raises(OptionError, match="prompt_logprobs"):
        GenerationOptions(prompt_logprobs=1, context_policy="shift")
    with pytest.raises(OptionError, match="prompt_logprobs"):
        GenerationOptions(prompt_logprobs=-1)
