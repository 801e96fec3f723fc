"""Exceptions in the engine's thread: they reach the reader, and later answers are as usual."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from asynchronous_checks import prompt, until
from inspection import end_thread, live

from edgellm import EdgeLLMError, OptionError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load


class PanicException(BaseException):
    """An error of Rust's libraries, which is no Exception."""


@pytest.mark.parametrize("kind", [PanicException, SystemExit, asyncio.CancelledError, ValueError])
def test_an_exception_of_any_kind_reaches_who_waits(tiny: LLM, kind: type[BaseException]) -> None:
    expected = tiny.generate(prompt(1, 20), temperature=0, max_tokens=5)

    def raising(scores: np.ndarray, tokens: Sequence[int]) -> None:
        if len(tokens) == 2:
            raise kind("no more")

    async def answers() -> None:
        for _ in range(2):
            with pytest.raises(kind):
                await tiny.agenerate(prompt(2, 20), max_tokens=5, logit_filter=raising)
            again = await tiny.agenerate(prompt(1, 20), temperature=0, max_tokens=5)
            assert again.tokens == expected.tokens

    asyncio.run(answers())


def test_an_exception_that_comes_between_two_waits_is_told_with_the_next(tiny: LLM) -> None:
    """The reader has taken a piece, and does something else."""

    def raising(scores: np.ndarray, tokens: Sequence[int]) -> None:
        if len(tokens) == 3:
            raise PanicException("no more")

    async def answer() -> None:
        stream = tiny.astream(prompt(2, 20), max_tokens=9, ignore_eos=True, logit_filter=raising)
        await anext(stream)
        await until(lambda: not live(tiny))
        with pytest.raises(PanicException):
            async for _ in stream:
                pass

    asyncio.run(answer())


def test_a_callback_that_uses_its_own_model_is_told_so(tiny: LLM) -> None:
    def asking(scores: np.ndarray, tokens: Sequence[int]) -> None:
        tiny.generate(prompt(3, 20), max_tokens=1)

    with pytest.raises(OptionError, match="used the model that calls it"):
        tiny.generate(prompt(2, 20), max_tokens=5, logit_filter=asking)


def test_a_thread_that_has_ended_says_so(tiny: LLM) -> None:
    fresh = load(str(tiny.engine.bundle.path), ctx_size=BLOCK)
    stream = fresh.stream(prompt(2, 20), max_tokens=100, ignore_eos=True)
    next(stream)
    end_thread(fresh)
    with pytest.raises(EdgeLLMError, match="thread has ended"):
        list(stream)
    with pytest.raises(EdgeLLMError, match="load the model again"):
        fresh.generate("Hello", max_tokens=1)
