"""The reason why no more of a prompt was found in the KV cache, as the statistics tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import Stats
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

PROMPT = [(7 * i * i + 3 * i + 5) % 300 for i in range(2 * BLOCK + 9)]
AT = BLOCK + 40
OTHER = [*PROMPT[:AT], (PROMPT[AT] + 1) % 300, *PROMPT[AT + 1 :]]


def ask(llm: LLM, tokens: list[int], **options: int) -> tuple[int, str]:
    stats: Stats = llm.generate(tokens, max_tokens=2, ignore_eos=True, **options).stats
    return stats.cached_tokens, stats.cache_end


@pytest.fixture
def small(tiny_model: Path) -> LLM:
    """A model whose cache holds little more than one prompt."""
    return load(str(tiny_model), ctx_size=3 * BLOCK, cache_size=3 * BLOCK)


def test_ends_of_what_is_cached(small: LLM) -> None:
    assert ask(small, PROMPT) == (0, "new")
    assert ask(small, PROMPT) == (len(PROMPT) - 1, "whole")
    longer = [*PROMPT, *PROMPT[:9]]
    assert ask(small, longer)[1] == "differs"  # from the answer
    assert ask(small, PROMPT[:AT]) == (AT - 1, "whole")
    assert ask(small, OTHER) == (AT, "differs")


def test_memory_that_others_needed(small: LLM) -> None:
    ask(small, PROMPT)
    ask(small, [token + 1 for token in PROMPT])
    assert ask(small, PROMPT) == (BLOCK, "reused")


def test_a_prompt_whose_tokens_are_scored(small: LLM) -> None:
    ask(small, PROMPT)
    assert ask(small, PROMPT, prompt_logprobs=1) == (0, "scored")


def test_a_prompt_that_another_one_computes(small: LLM) -> None:
    found = small.generate([PROMPT[:BLOCK], PROMPT[:BLOCK]], max_tokens=1, ignore_eos=True)
    assert [answer.stats.cache_end for answer in found] == ["new", "whole"]
