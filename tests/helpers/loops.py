"""Many answers at once: what tests of the loop, of its lanes and of asyncio ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from inspection import paused, results, submitted
from waiting import CEILING_S, until

from edgellm import Completion
from edgellm.llm import LLM

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SHORT: dict[str, Any] = {**GREEDY, "max_tokens": 12}

# A prompt's tokens, and the options of its answer.
Call = tuple[list[int], dict[str, Any]]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


def short(prompts: Iterable[list[int]], **options: Any) -> list[Call]:
    """Greedy answers of twelve tokens, but for other options."""
    return [(tokens, {**SHORT, **options}) for tokens in prompts]


def alone(llm: LLM, calls: Iterable[Call]) -> list[Completion]:
    """Answers one after the other."""
    return [llm.generate(tokens, **options) for tokens, options in calls]


def begin_together(
    pool: ThreadPoolExecutor, llm: LLM, calls: Iterable[Call]
) -> list[Future[Completion]]:
    """Answers in threads of a pool; the first step for any of them has all, in this order."""
    before, begun = len(submitted(llm)), list[Future[Completion]]()
    with paused(llm):
        for tokens, options in calls:
            begun.append(pool.submit(llm.generate, tokens, **options))
            until(lambda: len(submitted(llm)) == before + len(begun))
    return begun


def together(llm: LLM, calls: Collection[Call]) -> list[Completion]:
    """Answers in a thread each; see `begin_together`."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return results(begin_together(pool, llm, calls))


def tokens_of(answers: Iterable[Completion]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == theirs.logprobs
        assert ours.text == theirs.text
        assert ours.finish_reason == theirs.finish_reason


def assert_no_new_thread(before: set[threading.Thread]) -> None:
    """Every thread that began since has ended, or is about to; a model's lives as long as it."""
    for thread in set(threading.enumerate()) - before:
        if thread.name == "edgellm-engine":
            continue
        thread.join(CEILING_S)
        assert not thread.is_alive(), thread


class Gate:
    """Holds up the calls of a function until the test opens it.

    A call in the thread of an event loop fails at once: nothing could open the gate.

    Attributes:
        reached: there was a call.
        opened: calls go on.
        stopped: a call was told by its `should_stop` that its result is not needed.
    """

    def __init__(self, owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.stopped = False
        inner = getattr(owner, name)

        def held(*arguments: Any, **options: Any) -> Any:
            def may_go_on() -> bool:
                should_stop = options.get("should_stop")
                self.stopped = self.stopped or (should_stop is not None and should_stop())
                return self.opened.is_set()

            self.reached.set()
            assert self.opened.is_set() or not _in_event_loop(), f"{name} blocks the event loop"
            until(may_go_on)
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, held)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
