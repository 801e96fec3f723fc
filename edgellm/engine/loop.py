"""The loop: all answers that are on their way, and the threads that wait for them.

A thread that waits for a piece makes a step, which is for all. No thread is started but that of a
policy that has prompts computed elsewhere meanwhile (`prefill_lane.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from edgellm.backends.backend import Backend
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.batcher import Batcher
from edgellm.engine.bell import Bell
from edgellm.engine.pending import WORKING, Pending, Waiting
from edgellm.engine.request import Request
from edgellm.engine.scheduler import SchedulerCounts
from edgellm.engine.two_lanes import TwoLaneBatcher
from edgellm.options import EngineOptions
from edgellm.results import Piece

T = TypeVar("T")
# Before a thread that waits for the lock looks again whether another one steps.
_MOMENT_S = 0.002


class Loop:
    """Brings requests forward, step by step, in the threads of those who read them."""

    def __init__(
        self, cache: KVCache, options: EngineOptions, *, prefill: Backend, decoder: Backend
    ) -> None:
        self._cache = cache
        self._bell = Bell()
        self._batcher = self._new_batcher(options, prefill=prefill, decoder=decoder)
        self._stepping = False

    @property
    def counts(self) -> SchedulerCounts:
        """Counters of the scheduler since the model was loaded."""
        return self._batcher.counts

    def drive(self, pending: Pending[T]) -> Iterator[T]:
        """Iterate the items of `pending`, making a step wherever it waits for one."""
        try:
            for item in pending:
                if isinstance(item, Waiting):
                    self.advance(item.requests)
                elif item is not WORKING:
                    yield item
        finally:
            pending.close()

    def pieces(self, request: Request) -> Pending[Piece]:
        """Submit a request, and take its pieces.

        Raises:
            OptionError, ContextOverflowError: see `Request.check`.
            Exception: what its own work raised.
        """
        try:
            request.check()
            self.submit(request)
            while True:
                finished = request.finished  # before the last pieces are taken
                while request.pieces:
                    yield request.next_piece()
                if finished:
                    break
                yield Waiting([request])
            yield WORKING
            if request.error is not None:
                raise request.error
        finally:
            self.withdraw(request)

    def submit(self, request: Request) -> None:
        """Have a request taken in with the next step."""
        self._batcher.submit(request)

    def withdraw(self, request: Request) -> None:
        """Forget a request that has no reader. Safe from any thread and from `__del__`."""
        if request.withdraw():
            self._cache.soon(partial(self._batcher.leave, request))

    def advance(self, requests: Sequence[Request]) -> None:
        """Step, or let another thread that does, unless one of the requests has news already.

        Raises:
            OptionError: see `KVCache.lock`.
        """
        lock = self._cache.lock
        has_news = partial(have_news, requests)

        def busy() -> bool:
            return (self._stepping and lock.locked()) or self._batcher.resting

        while not has_news():
            if busy():
                return self._bell.wait(has_news, busy=busy)
            # Who has the lock and does not step has it for a moment. Who steps takes it again at
            # once: a thread that waited for it without an end would get it after seconds. `for` has
            # the answer in a variable before an interrupt can come.
            for taken in map(lock.acquire, (True,), (_MOMENT_S,)):
                if taken:
                    try:  # no call before it: an interrupt could come there
                        self._step(has_news)
                    finally:
                        lock.release()
                        self._bell.ring()
                    return

    def _new_batcher(
        self, options: EngineOptions, *, prefill: Backend, decoder: Backend
    ) -> Batcher:
        if options.scheduling != "two_devices":
            return Batcher(self._cache, options, prefill=prefill, decoder=decoder)
        assert isinstance(prefill, ChunkedBackend)  # see `Selection.scheduling`
        return TwoLaneBatcher(
            self._cache, options, prefill=prefill, decoder=decoder, on_news=self._bell.ring
        )

    def _step(self, has_news: Callable[[], bool]) -> None:
        """Make a step, in the thread that has the lock."""
        try:
            with self._cache.change():
                if not has_news():
                    self._stepping = True
                    self._batcher.step()
        finally:
            self._stepping = False


def have_news(requests: Sequence[Request]) -> bool:
    """Whether there is something to take of one of them."""
    return any(r.pieces or r.finished or r.report is not None for r in requests)
