"""Ends of earlier prompts in the server: which prompt they come from, and what is given back."""

from __future__ import annotations

import numpy as np
from inspection import used_blocks

from edgellm.engine.call import Call
from edgellm.engine.loop import run
from edgellm.generation_options import GenerationOptions
from edgellm.llm import LLM
from edgellm.serve.ask import Ask
from edgellm.serve.events import Client
from edgellm.serve.kept_ends import KeptEnds

TEXT = np.random.default_rng(3).integers(4, 320, 300).tolist()
CALL = Call(options=GenerationOptions(temperature=0))


def copied(llm: LLM, ends: KeptEnds, tokens: list[int], *, cache_reuse: int = 32) -> int:
    """Tokens in the KV cache before the answer of a request; 0 where none were copied."""
    ask = Ask(model=None, prompt="", cache_reuse=cache_reuse)
    context = run(
        llm.engine.loop,
        ends.begun(llm.engine, tokens, CALL, model="m", ask=ask, client=Client()),
    )
    if context is None:
        return 0
    assert context.tokens == tokens
    count = context.cached if context.sequence.shareable is not None else 0
    context.close()
    return count


def test_a_prompt_that_was_never_computed_gives_its_place_to_the_next(tiny: LLM) -> None:
    ends = KeptEnds()
    assert copied(tiny, ends, TEXT) == 0
    second, third = [5, *TEXT], [6, 6, *TEXT]  # the client of the first one was gone
    assert copied(tiny, ends, second) == 0
    tiny.generate(second, temperature=0, max_tokens=1)
    assert copied(tiny, ends, third) >= len(third) - 128
    assert copied(tiny, ends, [7, *TEXT], cache_reuse=0) == 0
    assert copied(tiny, ends, [7, *TEXT], cache_reuse=len(TEXT) + 1) == 0
    assert used_blocks(tiny) == 0


def test_prompts_of_several_files_are_remembered(tiny: LLM) -> None:
    ends = KeptEnds()
    files = [np.random.default_rng(i).integers(4, 320, 300).tolist() for i in range(5)]
    for file in files:
        assert copied(tiny, ends, file) == 0
        tiny.generate(file, temperature=0, max_tokens=1)
    for _ in range(2):
        for file in files[1:]:
            assert copied(tiny, ends, [5, 6, *file]) >= len(file) - 128
    assert copied(tiny, ends, [5, 6, *files[0]]) == 0  # four are
    assert used_blocks(tiny) == 0
