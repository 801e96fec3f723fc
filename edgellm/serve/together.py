"""Several asks of one request, answered at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from edgellm.serve.events import Delta, End, Event


async def together(
    streams: Sequence[AsyncGenerator[Event, None]], *, most_waiting: int
) -> AsyncGenerator[tuple[int, Event], None]:
    """Merge event streams: yield each event as it comes, with the number of its stream.

    When one stream fails, its error is raised, and the asks of the others are withdrawn.

    Args:
        most_waiting: largest number of streams that have begun and have no delta yet. Further
            streams begin when one of these has a delta, so that a request of many prompts finds
            room in the queue.
    """
    may_wait = asyncio.Semaphore(most_waiting)
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(maxsize=1)

    async def forward(number: int, stream: AsyncGenerator[Event, None]) -> None:
        await may_wait.acquire()
        waits = True
        try:
            async with aclosing(stream):
                async for event in stream:
                    if waits and isinstance(event, Delta | End):
                        may_wait.release()
                        waits = False
                    await queue.put((number, event))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)
        finally:
            if waits:
                may_wait.release()

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
