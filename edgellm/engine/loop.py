"""The loop: all answers that are on their way, in the engine's thread, and who waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from edgellm.backends.backend import Backend
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.batcher import Batcher
from edgellm.engine.request import Request
from edgellm.engine.scheduler import SchedulerCounts
from edgellm.engine.thread import EngineThread
from edgellm.engine.two_lanes import TwoLaneBatcher
from edgellm.options import EngineOptions


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
        """Make a step; an exception that is no request's own ends all requests."""
        try:
            self._batcher.step()
        except BaseException as error:
            self.fail(error)
        else:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """See `Worker`."""
        self._batcher.fail_all(error)
        self._wake()

    def _wake(self) -> None:
        """Wake the readers that have news, and forget requests of those whose thread has ended."""
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
