"""The loop: all answers that are on their way, in the engine's thread, and their readers.

Answers are generators that say where they wait, so that they run with and without asyncio.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias, TypeVar

from edgellm.backends.batch import Backend
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.batcher import Batcher
from edgellm.engine.request import Request
from edgellm.engine.scheduler import SchedulerCounts
from edgellm.engine.thread import EngineThread
from edgellm.engine.two_lanes import TwoLaneBatcher
from edgellm.options import EngineOptions
from edgellm.results import Piece

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=Request)
# Prompts submitted to the loop at once by `finished`; other requests may come before the next ones.
_WINDOW = 32


@dataclass(frozen=True)
class _Reader:
    """A reader that waits for news of requests, in a thread or in a thread's event loop."""

    requests: Sequence[Request]
    wake: Callable[[], object]
    thread: threading.Thread = field(default_factory=threading.current_thread)


class Loop:
    """Steps for all requests, while one of them has room for another piece.

    It runs ahead of a reader, until that has 64 unread pieces.
    """

    def __init__(
        self,
        thread: EngineThread,
        cache: KVCache,
        options: EngineOptions,
        *,
        prefill: Backend,
        decoder: Backend,
    ) -> None:
        self._thread = thread
        self._readers: dict[object, _Reader] = {}
        self._due = False  # whether readers may have news of which they were not told
        if options.scheduling != "two_devices":
            self._batcher = Batcher(cache, options, prefill=prefill, decoder=decoder)
        else:
            assert isinstance(prefill, ChunkedBackend)  # see `Selection.scheduling`
            self._batcher = TwoLaneBatcher(thread, cache, options, prefill=prefill, decoder=decoder)
        thread.attach(self)

    # for readers

    @property
    def counts(self) -> SchedulerCounts:
        """Counters of the scheduler since the model was loaded."""
        return self._batcher.counts

    def submit(self, request: Request) -> None:
        """Have a request taken in with the next step.

        Raises:
            OptionError, EdgeLLMError: see `EngineThread.check`.
        """
        self._thread.check()
        self._batcher.submit(request)
        self._thread.poke()

    def withdraw(self, request: Request) -> None:
        """Forget a request that has no reader. Safe from any thread and from `__del__`."""
        try:
            request.withdraw()
        finally:  # also when an interrupt comes
            if request.withdrawn:
                self._thread.soon(partial(self._batcher.leave, request))

    def wait(self, requests: Sequence[Request]) -> None:
        """Wait until one of the requests has news.

        Raises:
            OptionError, EdgeLLMError: see `EngineThread.check`.
        """
        news: queue.SimpleQueue[None] = queue.SimpleQueue()
        unwatch = self.watch(requests, partial(news.put, None))
        try:
            self._thread.wait(news)
        finally:
            unwatch()

    def watch(
        self, requests: Sequence[Request], wake: Callable[[], object]
    ) -> Callable[[], object]:
        """Have `wake` called once, when one of the requests has news; perhaps at once.

        Args:
            wake: called in the engine's thread or in this one; raises nothing.

        Returns:
            A function that ends the watch.

        Raises:
            OptionError, EdgeLLMError: see `EngineThread.check`.
        """
        self._thread.check()
        key = object()
        unwatch = partial(self._readers.pop, key, None)
        self._readers[key] = _Reader(requests, wake)  # before the look: the engine looks as well
        if not _have_news(requests):
            self._thread.poke()  # the reader has taken all, so paused requests may go on
        elif unwatch() is not None:
            wake()
        return unwatch

    # for the engine's thread

    @property
    def has_work(self) -> bool:
        """See `Worker`."""
        return self._batcher.has_work

    @property
    def away(self) -> bool:
        """See `Worker`."""
        return self._batcher.away

    def step(self) -> None:
        """Make a step; an exception that is no request's own ends all requests.

        Readers are woken as the next batch begins, while C++ has no need of the interpreter's lock:
        woken before it is planned, they wait for the lock and keep the engine (70 µs a token).
        """
        self._due = True
        try:
            self._batcher.step(wake=self._wake)
        except BaseException as error:
            return self.fail(error)
        if self._due:  # nothing was computed
            self._wake()
        self._due = True

    def pause(self) -> None:
        """See `Worker`."""
        if self._due:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """See `Worker`."""
        self._batcher.fail_all(error)
        self._wake()

    def _wake(self) -> None:
        """Wake the readers that have news, and forget requests of those whose thread has ended."""
        self._due = False
        for key, reader in self._readers.copy().items():  # others come and go meanwhile
            if _have_news(reader.requests) and self._readers.pop(key, None) is not None:
                reader.wake()
            elif not _is_alive(reader.thread) and self._readers.pop(key, None) is not None:
                for request in reader.requests:
                    self.withdraw(request)
            elif all(request.withdrawn for request in reader.requests):
                self._readers.pop(key, None)  # of a watch that was interrupted


def _is_alive(thread: threading.Thread) -> bool:
    # an interrupt in `Thread.join` has a thread called dead that runs (CPython 3.11)
    return thread.is_alive() or thread in threading.enumerate()


def _have_news(requests: Sequence[Request]) -> bool:
    return any(request.has_news for request in requests)


@dataclass(frozen=True)
class Waiting:
    """An item that waits for news of one of the requests."""

    requests: Sequence[Request]


class _Marker(Enum):
    WORKING = "working"


# What follows takes long: it encodes a text, waits for a step, writes to disk, or is the caller's.
# So does what comes before the first item.
WORKING = _Marker.WORKING
Wait: TypeAlias = Waiting | Literal[_Marker.WORKING]
Pending: TypeAlias = Generator[T | Wait, None, None]


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
        while request.whole and request.pieces:  # after an interrupt they stay in the session
            request.next_piece()
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


def run(loop: Loop, work: Generator[Wait, None, T]) -> T:
    """Run work to its end in this thread; returns its result."""
    [result] = iterate(loop, _result(work))
    return result


async def arun(loop: Loop, work: Generator[Wait, None, T]) -> T:
    """Run work to its end as `run` does, in an event loop, see `aiterate`."""
    [result] = [item async for item in aiterate(loop, _result(work))]
    return result


def _result(work: Generator[Wait, None, T]) -> Pending[T]:
    yield (yield from work)


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
