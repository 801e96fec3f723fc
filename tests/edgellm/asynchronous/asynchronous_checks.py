"""What tests of answers with asyncio share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from inspection import live, used_blocks
from loops import Call, prompt
from waiting import CEILING_S

from edgellm.llm import LLM

LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}
REQUESTS: list[Call] = [
    (
        prompt(i % 23, (5, 60, 130, 300, 513, 40)[i % 6] + i),
        {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 4 + 5 * (i % 7)},
    )
    for i in range(30)
]


def is_idle(llm: LLM) -> bool:
    """Whether no answer is on its way, and none holds anything."""
    return used_blocks(llm) == 0 and not live(llm)  # in this order: it waits for commands


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition while the event loop goes on."""
    async with asyncio.timeout(CEILING_S):
        while not condition():
            await asyncio.sleep(0.001)


async def turns(count: int = 20) -> None:
    """Let the event loop go round, with all that is ready."""
    for _ in range(count):
        await asyncio.sleep(0)
