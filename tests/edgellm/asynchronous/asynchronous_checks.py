"""What tests of answers with asyncio share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edgellm import Completion
from edgellm.llm import LLM

LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


# Of each answer: its prompt's tokens, and how they are answered.
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (
        prompt(i % 23, (5, 60, 130, 300, 513, 40)[i % 6] + i),
        {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 4 + 5 * (i % 7)},
    )
    for i in range(30)
]


def assert_no_thread_is_left(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)  # the pump may be in its last step
        assert not thread.is_alive(), thread


def used_blocks(llm: LLM) -> int:
    with llm.engine.lock, llm.engine.cache.change():
        return llm.engine.cache.used_blocks


def live_requests(llm: LLM) -> int:
    return len(llm.engine.loop._batcher._live)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> bool:
    return [(a.tokens, a.logprobs, a.text, a.finish_reason) for a in ours] == [
        (a.tokens, a.logprobs, a.text, a.finish_reason) for a in theirs
    ]


class Gate:
    """A function in front of another, which waits until the event loop has opened it.

    If it is called in the event loop's own thread, that is not before the timeout.
    """

    def __init__(self, owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._called, self._open = threading.Event(), threading.Event()
        inner = getattr(owner, name)

        def gated(*arguments: Any, **options: Any) -> Any:
            self._called.set()
            assert self._open.wait(timeout=20), f"{name} blocked the event loop"
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, gated)

    async def pass_one(self) -> None:
        await until(self._called.is_set)
        self._open.set()
