"""Answers as generators that say where they wait, so that they run with and without asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias, TypeVar

from edgellm.engine.loop import Loop
from edgellm.engine.request import Request
from edgellm.results import Piece

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=Request)
# Prompts submitted to the loop at once by `finished`; other requests may come before the next ones.
_WINDOW = 32


@dataclass(frozen=True)
class Waiting:
    """An item that waits for news of one of the requests."""

    requests: Sequence[Request]


class _Marker(Enum):
    WORKING = "working"


# What follows takes long: it encodes a text, waits for a step, writes to disk, or is the caller's.
# So does what comes before the first item.
WORKING = _Marker.WORKING
Pending: TypeAlias = Generator[T | Waiting | Literal[_Marker.WORKING], None, None]


def pieces(loop: Loop, request: Request) -> Pending[Piece]:
    """Submit a request, and take its pieces.

    Raises:
        OptionError, ContextOverflowError: see `Request.check`.
        BaseException: an exception of its own work, or of a step.
    """
    try:
        request.check()
        loop.submit(request)
        while True:
            finished = request.finished  # before the last pieces are taken
            while request.pieces:
                request.check_unchanged()
                yield request.next_piece()
            if finished:
                break
            yield Waiting([request])
        request.raise_error()
    finally:
        loop.withdraw(request)


def finished(loop: Loop, requests: Sequence[RequestT]) -> Pending[RequestT]:
    """Submit requests that nothing is read of but their end, some at a time, and yield them in
    their order as they end.

    Raises:
        BaseException: an exception of a request's own work, or of a step.
    """
    following = iter(requests)
    try:
        for request in islice(following, _WINDOW):
            loop.submit(request)
        for request in requests:
            while not request.finished:
                yield Waiting([request])
            while request.pieces:
                request.next_piece()
            request.raise_error()
            yield request
            yield WORKING
            for later in islice(following, 1):
                loop.submit(later)
    finally:
        for request in requests:
            loop.withdraw(request)


def iterate(loop: Loop, pending: Pending[T]) -> Iterator[T]:
    """Iterate the items of `pending` in this thread."""
    try:
        for item in pending:
            if isinstance(item, Waiting):
                loop.wait(item.requests)
            elif item is not WORKING:
                yield item
    finally:
        pending.close()


async def aiterate(loop: Loop, pending: Pending[T]) -> AsyncGenerator[T, None]:
    """Iterate the items of `pending` in an event loop, which nothing that takes long blocks.

    The first part of an answer, and what it marks as `WORKING`, run in asyncio's pool of threads.
    When the task is cancelled, or the generator closed, its requests are withdrawn.
    """
    item: T | Waiting | object = WORKING
    requests: Sequence[Request] = ()
    try:
        while item is not None:
            if item is WORKING:
                item = await _in_thread(partial(next, pending, None))
                continue
            if isinstance(item, Waiting):
                requests = item.requests
                await _news(loop, requests)
            else:
                yield item  # type: ignore[misc]
            item = next(pending, None)
    finally:
        if item is not None:
            for request in requests:
                loop.withdraw(request)  # at once: a running step ends early
            await _in_thread(pending.close)


async def _news(loop: Loop, requests: Sequence[Request]) -> None:
    """Wait until one of the requests has news."""
    import asyncio  # 30 ms, for asyncio alone

    event_loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = event_loop.create_future()

    def wake() -> None:
        try:
            event_loop.call_soon_threadsafe(finish)
        except RuntimeError:  # it was closed
            for request in requests:
                loop.withdraw(request)

    def finish() -> None:
        if not future.done():  # cancelled
            future.set_result(None)

    unwatch = loop.watch(requests, wake)
    try:
        await future
    finally:
        unwatch()


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
