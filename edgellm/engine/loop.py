"""The loop: a scheduler says who is next, a back end computes a batch, each request gets its piece.

Whoever waits for a piece steps, and what a step computes is for all. No thread is started.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Rows, Span
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.pending import WORKING, Pending, Waiting
from edgellm.engine.policies import chosen_policy
from edgellm.engine.scheduler import Scheduler, SchedulerCounts, Share
from edgellm.engine.step_costs import StepCosts
from edgellm.errors import CacheFullError, CancelledError, EdgeLLMError, OptionError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.options import EngineOptions
from edgellm.results import Piece

if TYPE_CHECKING:
    from edgellm.engine.request import Request  # of a context, which is of an engine with a loop

T = TypeVar("T")
# How long someone waits who may have missed the end of another thread's change, in seconds.
_PATIENCE = 0.005
# Rows for which asking between layers whether to stop, 0.5 µs, is nothing.
_MANY_ROWS = 64


@dataclass(frozen=True)
class _Work:
    """A request's part of a step.

    Attributes:
        decoded: whether it is the token sampled last, and its draft.
    """

    share: Share[Request]
    span: Span
    decoded: bool

    @property
    def request(self) -> Request:
        return self.share.request


class Loop:
    """All answers that are on their way, and the steps that bring them forward."""

    def __init__(
        self, cache: KVCache, options: EngineOptions, *, prefill: Backend, decoder: Backend
    ) -> None:
        self._cache = cache
        self._options = options
        self._prefill = prefill
        self._decoder = decoder
        # of decode and prompts together, where both are in the same chunks
        self._row_multiple = prefill.row_multiple if prefill is decoder else 1
        self._costs = StepCosts(row_multiple=self._row_multiple)
        self._scheduler = self._new_scheduler()
        self._submitted: deque[Request] = deque()
        self._live: dict[int, Request] = {}
        self._failed: list[tuple[Request, Exception]] = []
        self._parked: list[Request] = []
        self._taking: Request | None = None
        self._intact = True
        # entered as the bare lock: an interrupt in a context manager of Python's own would leave it
        # taken
        self._bell_lock = threading.RLock()
        self._bell = threading.Condition(self._bell_lock)

    @property
    def counts(self) -> SchedulerCounts:
        """What was computed so far."""
        return self._scheduler.counts

    def drive(self, pending: Pending[T]) -> Iterator[T]:
        """What there is to have, with a step wherever it waits for one."""
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
            Exception: what its own work raised.
        """
        request.check()
        self.submit(request)
        try:
            while True:
                finished = request.finished  # before the last pieces are taken
                while request.pieces:
                    yield request.pieces.popleft()
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
        self._submitted.append(request)

    def withdraw(self, request: Request) -> None:
        """Forget a request that is not finished; from anywhere, also the garbage collector."""
        if not request.finished:
            request.withdrawn = True
            request.context.answering = False
            self._cache.soon(partial(self._leave, request))

    def advance(self, requests: Sequence[Request]) -> None:
        """Step, or let another thread that does, unless one of the requests has news already."""
        lock = self._cache.lock
        if lock.locked():
            with self._bell_lock:
                if lock.locked() and not have_news(requests):
                    self._bell.wait(_PATIENCE)
            return
        with lock:
            if not have_news(requests):
                self.step()
        with self._bell_lock:
            self._bell.notify_all()

    def step(self) -> None:
        """Compute a batch, and give each request its piece; for whoever has the cache's lock."""
        if not self._intact:
            self._repair()
        self._intact = False  # in case of an interrupt
        self._cache.collect()
        self._take_in()
        self._end()
        shares = self._next()
        together = self._prefill is self._decoder
        decoding = [share for share in shares if together or share.request.decoding]
        others = [share for share in shares if not (together or share.request.decoding)]
        start = time.perf_counter()
        done = self._compute(self._decoder, decoding, alone=len(shares) == 1)
        done += self._compute(self._prefill, others, alone=len(shares) == 1)
        if done:
            self._scheduler.done(done, time.perf_counter() - start)
        elif self._scheduler.waiting:
            self._park()
        self._intact = True

    def _next(self) -> list[Share[Request]]:
        """What the scheduler wants; a request whose reader is slow waits for it."""
        shares = self._scheduler.next(self._admit)
        for request, error in self._failed:
            self._fail(request, error)
        self._failed = []
        return [share for share in shares if not share.request.paused]

    def _park(self) -> None:
        """Take the places of those whose readers are slow, for others that wait for them."""
        for request in [each for each in self._scheduler.running if each.paused]:
            self._scheduler.remove(request)
            self._parked.append(request)
            request.preempt()

    def _admit(self, request: Request) -> bool:
        """Whether there is room for a waiting request's whole prompt; it is begun then."""
        running = self._scheduler.running
        growing = [(each.context.sequence, len(each.tokens)) for each in (*running, request)]
        if running and not self._cache.has_room(growing):
            return False
        try:
            request.begin()
        except EdgeLLMError as error:
            self._failed.append((request, error))
            return False
        return True

    def _compute(
        self, backend: Backend, shares: Sequence[Share[Request]], *, alone: bool
    ) -> list[Share[Request]]:
        """Run the shares of a step in one batch, without the newest where the cache is full.

        Where the batch fails, each runs by itself: the bits are the same, and one that is at fault
        fails alone. Returns the shares that were computed.
        """
        while work := self._work(shares, alone=alone):
            start = time.perf_counter()
            try:
                results = backend.run([part.span for part in work], should_stop=_should_stop(work))
            except CancelledError:
                break
            except CacheFullError as error:
                shares = self._without_newest(work, shares, error, drafted=alone)
                alone = False
            except Exception as error:
                if len(work) > 1:
                    apart = (self._compute(backend, [share], alone=False) for share in shares)
                    return [share for done in apart for share in done]
                self._fail(work[0].request, error)
                break
            else:
                seconds = time.perf_counter() - start
                for part, rows in zip(work, results, strict=True):
                    self._take(part, rows, alone=alone, seconds=seconds)
                return [part.share for part in work]
        return []

    def _work(self, shares: Sequence[Share[Request]], *, alone: bool) -> list[_Work]:
        work = []
        for share in shares:
            request = share.request
            if request.finished:
                continue
            try:
                span = request.span(share.rows, alone=alone)
            except EdgeLLMError as error:
                self._fail(request, error)
            else:
                work.append(_Work(share, span, decoded=request.decoding))
        return work

    def _without_newest(
        self,
        work: Sequence[_Work],
        shares: Sequence[Share[Request]],
        error: CacheFullError,
        *,
        drafted: bool,
    ) -> list[Share[Request]]:
        """The shares to go on with when the cache is full: without a draft, or without the newest
        request, whose blocks are given back."""
        if drafted and len(work[0].span.tokens) > shares[0].rows:
            return list(shares)
        newest = self._scheduler.preempt()
        if newest is None:
            newest = work[0].request
            self._fail(newest, error)
        else:
            newest.preempt()
        return [share for share in shares if share.request is not newest]

    def _take(self, part: _Work, rows: Rows, *, alone: bool, seconds: float) -> None:
        request = self._taking = part.request
        try:
            request.take(rows, decoded=part.decoded, alone=alone, seconds=seconds)
        except Exception as error:
            self._fail(request, error)
        self._taking = None
        if request.forks and rows.logits:
            self._fork(request, rows)
        if request.finished:
            self._leave(request)

    def _fork(self, request: Request, rows: Rows) -> None:
        """Let other answers to a prompt begin where it ends."""
        forks, request.forks = request.forks, []
        rows = Rows(rows.hidden[:0], rows.logits)
        for fork in forks:
            try:
                fork.begin_at(request)
                fork.take(rows, decoded=False, alone=False, seconds=0.0)
            except Exception as error:
                fork.fail(error)
            if fork.finished:
                fork.leave()
            else:
                self.submit(fork)

    def _take_in(self) -> None:
        """Let the scheduler know of the requests that came, or came back, since the last step."""
        parked, self._parked = self._parked, []
        for request in parked:
            if request.paused and id(request) in self._live:
                self._parked.append(request)
            elif id(request) in self._live:
                self._scheduler.add(request)
        while self._submitted:
            request = self._submitted[0]
            if id(request) not in self._live and not request.withdrawn:
                self._live[id(request)] = request
                self._scheduler.add(request)
            self._submitted.popleft()

    def _end(self) -> None:
        """End what was cancelled, or ran out of time, or is of another session by now."""
        for request in list(self._live.values()):
            reason = request.end_reason()
            if request.withdrawn or request.finished:
                self._leave(request)
            elif request.changed:
                self._fail(request, OptionError("the session was changed while it answered"))
            elif reason is not None:
                request.finish(reason)
                self._leave(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.fail(error)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Forget a request; answers that wanted to begin at its end begin by themselves."""
        if self._live.pop(id(request), None) is not None:
            self._scheduler.remove(request)
        request.leave()
        self._submitted.extend(request.forks)
        request.forks = []

    def _new_scheduler(self) -> Scheduler[Request]:
        rows = self._prefill.rows_at_once(self._cache.sequence())
        policy = chosen_policy(
            self._options.scheduling,
            time_target=self._options.time_target_ms / 1000,
            max_rows=rows,
            row_multiple=self._row_multiple,
        )
        return Scheduler(policy=policy, costs=self._costs, block_size=BLOCK)

    def _repair(self) -> None:
        """After an interrupt, which may have come anywhere: begin all requests again.

        One that was about to take its piece may have lost it.
        """
        broken, self._taking = self._taking, None
        if broken is not None and not broken.finished:
            broken.fail(CancelledError("interrupted by an exception of a signal handler"))
        self._scheduler = self._new_scheduler()
        self._failed, self._parked = [], []
        self._live = {k: r for k, r in self._live.items() if not (r.finished or r.withdrawn)}
        for request in self._live.values():
            self._scheduler.add(request)


def have_news(requests: Sequence[Request]) -> bool:
    """Whether there is something to take of one of them."""
    return any(request.pieces or request.finished for request in requests)


def _should_stop(work: Sequence[_Work]) -> Callable[[], bool] | None:
    """Asked between layers of a long step: whether nobody needs the end of it."""
    if sum(len(part.span.tokens) for part in work) < _MANY_ROWS:
        return None
    return lambda: all(part.request.stop_now() for part in work)
