"""Several asks of one request at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from edgellm.serve.events import Event


async def together(
    streams: Sequence[AsyncGenerator[Event, None]],
) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all streams as they come, each with the number of its stream.

    When one fails, so does this, and the others are withdrawn.
    """
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(maxsize=1)

    async def forward(number: int, stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((number, event))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
