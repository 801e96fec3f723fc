"""The same answers for asyncio: no step, and nothing else that takes long, in the event loop.

The first part of an answer, and what it marks as long, run in asyncio's pool of threads; steps in
the engine's pump; what is left takes microseconds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from edgellm.engine.engine import Engine
from edgellm.engine.pending import WORKING, Pending, Waiting
from edgellm.engine.pump import Pump, Reader
from edgellm.errors import CancelledError

if TYPE_CHECKING:
    import asyncio

    from edgellm.engine.request import Request

T = TypeVar("T")


async def driven(engine: Engine, pending: Pending[T]) -> AsyncGenerator[T, None]:
    """Iterate the items of `pending` in an event loop; the pump's thread makes the steps.

    When it is cancelled or closed, its requests are withdrawn before that ends.
    """
    reader = Reader()
    item: T | Waiting | object = WORKING
    try:
        while item is not None:
            if item is WORKING:
                item = await _in_thread(partial(next, pending, None))
                continue
            if isinstance(item, Waiting):
                await _news(engine.pump, reader, item.requests)
            else:
                yield item  # type: ignore[misc]
            item = next(pending, None)
    except CancelledError:
        # what ended the step in its middle has cost the answer a piece, and says more
        if reader.error is not None:
            raise reader.error from None
        raise
    finally:
        if item is not None:
            reader.withdraw()
            await _in_thread(pending.close)


async def _news(pump: Pump, reader: Reader, requests: Sequence[Request]) -> None:
    """Wait until one of the requests has something."""
    import asyncio  # 30 ms, for asyncio alone

    event_loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = event_loop.create_future()

    def wake(error: BaseException | None) -> None:
        try:
            event_loop.call_soon_threadsafe(_finish, future, error)
        except RuntimeError:  # it was closed
            reader.withdraw()

    if pump.watch(reader, requests, wake):
        await future


def _finish(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():  # cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


async def _in_thread(function: Callable[[], T]) -> T:
    """Call a function in asyncio's pool of threads; a cancellation waits for its end."""
    import asyncio

    context = copy_context()
    try:
        future = asyncio.get_running_loop().run_in_executor(None, lambda: context.run(function))
    except RuntimeError:  # the event loop is at its end, or gone
        return function()
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return future.result()
    future.exception()  # taken, so that asyncio does not log it
    raise cancelled
