"""Exceptions in the pump's thread: they reach the reader, and later answers are as usual."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asynchronous_checks import prompt
from waiting import CEILING_S, until

from edgellm.engine.pump import Reader
from edgellm.engine.request import Request
from edgellm.llm import LLM


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


def test_an_exception_that_comes_between_two_waits_is_told_with_the_next(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has taken a piece, and does something else."""
    failed = threading.Event()

    def raising(scores: np.ndarray, tokens: Sequence[int]) -> None:
        if len(tokens) == 3:
            raise PanicException("no more")

    advance = tiny.engine.loop.advance

    def watched(requests: Sequence[Request]) -> None:
        try:
            advance(requests)
        except PanicException:
            failed.set()
            raise

    monkeypatch.setattr(tiny.engine.loop, "advance", watched)

    async def answer() -> None:
        stream = tiny.astream(prompt(2, 20), max_tokens=9, ignore_eos=True, logit_filter=raising)
        await anext(stream)
        assert failed.wait(CEILING_S)
        until(lambda: not any(t.name == "edgellm-pump" for t in threading.enumerate()))
        with pytest.raises(PanicException):
            async for _ in stream:
                pass

    asyncio.run(answer())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_followed_by_another(tiny: LLM) -> None:
    """Here of a reader that cannot be woken."""
    told = threading.Event()
    request: Any = SimpleNamespace(
        pieces=(), finished=False, report=None, withdrawn=False, paused=False
    )

    def wake(error: BaseException | None) -> None:
        told.set()
        raise ValueError("cannot be woken")

    assert tiny.engine.pump.watch(Reader(), [request], wake)
    request.finished = True
    assert told.wait(CEILING_S)
    answer = asyncio.run(tiny.agenerate(prompt(3, 20), max_tokens=2, ignore_eos=True))
    assert len(answer.tokens) == 2
