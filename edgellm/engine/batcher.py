"""Steps: the scheduler picks rows, a back end computes them, and each request gets its piece."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edgellm.backends.batch import Backend, Rows, Span
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.draft_policy import common_length
from edgellm.engine.plan import Plan, Share
from edgellm.engine.prefill_job import Layered
from edgellm.engine.prompt_rows import SchedulingPolicy, Serial, StallFree
from edgellm.engine.request import Request
from edgellm.engine.scheduler import Scheduler, SchedulerCounts
from edgellm.engine.step_costs import StepCosts
from edgellm.errors import CacheFullError, CancelledError
from edgellm.options import EngineOptions

_log = logging.getLogger(__name__)
# Rows of a prompt that has the engine for itself, in native steps; see `StallFree`.
_LONE_ROWS = 128
# Minimum of prompt rows and maximum of decoding sequences in a step.
_MIN_ROWS, _DECODES = 32, 64
# Maximum of plans of a step. One for 64 requests takes 0.7 ms, and of prompts whose beginning is in
# the KV cache each may take another one.
_MOST_PLANS = 8
# Rows in a step from which on the 0.5 µs to ask between layers whether to stop are negligible.
_MANY_ROWS = 64
# Sequences in a step up to which they draft: of more, each draft's rows take as long as steps.
_DRAFTING = 4


@dataclass(frozen=True)
class Work:
    """A request's part of a step.

    Attributes:
        decoded: whether the rows are the token sampled last, and its draft.
    """

    share: Share[Request]
    span: Span
    decoded: bool

    @property
    def request(self) -> Request:
        return self.share.request

    @property
    def drafted(self) -> bool:
        """Whether a draft is computed with the rows."""
        return self.span.drafted > 0


class Batcher:
    """Requests from their submission until they leave, computed in steps.

    All but `submit` and `counts` is for the engine's thread. An exception of a request's own work
    is the request's. An exception out of `step` has left it half done, and `fail_all` follows.
    """

    def __init__(
        self, cache: KVCache, options: EngineOptions, *, prefill: Backend, decoder: Backend
    ) -> None:
        self._cache = cache
        self._options = options
        self._prefill = prefill
        self._decoder = decoder
        # of decode and prompt rows together, where both are in the same chunks
        self._row_multiple = prefill.row_multiple if prefill is decoder else 1
        self._scheduler: Scheduler[Request] = Scheduler(
            policy=self._policy(), costs=StepCosts(row_multiple=self._row_multiple)
        )
        self._submitted: deque[Request] = deque()
        self._live: dict[int, Request] = {}
        self._parked: list[Request] = []

    @property
    def counts(self) -> SchedulerCounts:
        """Counts of what was computed so far."""
        return self._scheduler.counts

    def submit(self, request: Request) -> None:
        """Submit a request, from any thread; the next step takes it in."""
        self._submitted.append(request)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do: a request that does not wait for its reader."""
        return bool(self._submitted) or any(not each.paused for each in self._live.values())

    @property
    def away(self) -> bool:
        """Whether another thread computes for a request."""
        return False

    def step(self, *, wake: Callable[[], object]) -> None:
        """Compute a batch, and give each request its piece.

        Args:
            wake: function called whenever a batch is about to be computed.
        """
        self._scheduler.counts.steps += 1
        if self._submitted or self._scheduler.waiting:
            wake()  # a request that begins may have blocks on disk
        self._take_in()
        self._end()
        shares = self._next()
        together = self._prefill is self._decoder
        whole = [share for share in shares if share.layers is None]
        decoding = [share for share in whole if together or share.request.decoding]
        others = [share for share in whole if not (together or share.request.decoding)]
        company = _company(shares)
        start = time.perf_counter()
        done = self._compute(self._decoder, decoding, company=company, wake=wake)
        # to make room for a decode, the newest request may have lost its place
        others = [share for share in others if share.request in self._scheduler.running]
        done += self._compute(self._prefill, others, company=0, wake=wake)
        if done:
            self._learn(done, time.perf_counter() - start)
        for share in shares:
            if share.layers is not None:
                self._pass_group(share, wake)

    def fail_all(self, error: BaseException) -> None:
        """End all requests with an error that is none of theirs."""
        self._scheduler.start_again()
        self._parked = []
        requests = list(self._live.values())
        self._live.clear()
        while self._submitted:  # readers go on submitting meanwhile
            requests.append(self._submitted.popleft())
        while requests:
            request = requests.pop()
            requests += request.forks
            request.forks = []
            if not request.finished:
                request.fail(error)
            try:
                request.leave()
            except Exception:
                _log.exception("an answer could not give its memory back")

    def _pass_group(self, share: Share[Request], wake: Callable[[], object]) -> None:
        """Bring rows of a prompt through a group of layers, if it was not preempted meanwhile."""
        if share.request in self._scheduler.running:
            start = time.perf_counter()
            if self._compute(self._prefill, [share], company=0, wake=wake):
                self._scheduler.passed(share, time.perf_counter() - start)

    def leave(self, request: Request) -> None:
        """Forget a request; its forks, which were to begin at its end, are submitted."""
        self._scheduler.remove(request)
        self._live.pop(id(request), None)
        self._parked = [each for each in self._parked if each is not request]
        self._submitted.extend(request.forks)
        request.forks = []
        request.leave()

    def _next(self) -> list[Share[Request]]:
        """Choose the shares that this step computes."""
        request = self._scheduler.make_way()
        if request is not None:
            request.preempt()
        shares = self._planned(self._scheduler.plan)
        if self._scheduler.wants_room:
            self._park()
        return shares

    def _learn(self, done: Sequence[Work], seconds: float) -> None:
        """Count the shares of a step, and learn its seconds unless a draft was in it.

        Each row of a draft has logits: its time says nothing of rows of prompts.
        """
        shares = [part.share for part in done]
        if any(part.drafted for part in done):
            self._scheduler.count(shares)
        else:
            self._scheduler.done(shares, seconds)

    def _fail(self, request: Request, error: BaseException) -> None:
        request.fail(error)
        self.leave(request)

    def _park(self) -> None:
        """Take the place of a request whose reader is slow, for others that wait for a place."""
        request = next((each for each in self._scheduler.running if each.paused), None)
        if request is not None:
            self._scheduler.remove(request)
            self._parked.append(request)
            request.preempt()

    def _planned(self, plan: Callable[..., Plan[Request]]) -> list[Share[Request]]:
        """Begin the requests that a plan admits, and plan again, until it admits none."""
        admits, plans = True, 0
        while True:
            plans += 1
            admits = admits and plans < _MOST_PLANS
            made = plan(self._cache.free_blocks, admits=admits)
            if admits and made.full and self._cache.reclaim():
                continue
            if not made.admitted:
                return made.shares
            begun = (self._begin(request, first=first) for request, first in made.admitted.items())
            admits = all(begun)  # up to the first that finds no room

    def _begin(self, request: Request, *, first: bool) -> bool:
        """Begin a request; if no other one runs, with the blocks of waiting requests.

        Args:
            first: whether it is first in line.

        Returns:
            False if it goes on waiting, as there is no room.
        """
        scheduler = self._scheduler
        while True:
            try:
                request.begin()
            except CacheFullError as error:
                if scheduler.running:
                    scheduler.refuse(request, first=first)
                    return False
                holder = scheduler.preempt(but=request)
                if holder is None:
                    self._fail(request, error)
                    return True
                holder.preempt()
            except Exception as error:
                self._fail(request, error)
                return True
            else:
                scheduler.admitted(request)
                return True

    def _compute(
        self,
        backend: Backend,
        shares: Sequence[Share[Request]],
        *,
        company: int,
        wake: Callable[[], object],
    ) -> list[Work]:
        """Run shares of a step in one batch, without the newest request where the cache is full.

        Where the batch fails, each share runs by itself: the bits are the same, and only the
        request at fault fails. Returns the work that was done.
        """
        while shares:
            work: list[Work] = []
            wake()
            start = time.perf_counter()
            try:
                work = self._work(shares, company=company)
                if not work:
                    break
                results = backend.run([part.span for part in work], should_stop=_should_stop(work))
            except CancelledError:
                break
            except CacheFullError as error:
                if not any(part.drafted for part in work):
                    shares = self._without_newest(shares, error)
                company = 0  # and without a draft
            except Exception as error:
                if len(work) > 1:
                    apart = (
                        self._compute(backend, [share], company=0, wake=wake) for share in shares
                    )
                    return [part for done in apart for part in done]
                self._fail(work[0].request, error)
                break
            else:
                seconds = time.perf_counter() - start
                for part, rows in zip(work, results, strict=True):
                    self._take(part, rows, company=company, seconds=seconds)
                return work
        return []

    def _work(self, shares: Sequence[Share[Request]], *, company: int) -> list[Work]:
        """Return the work of shares; a request whose span cannot be made fails.

        Raises:
            CacheFullError: see `Request.span`.
        """
        work: list[Work] = []
        choices = [share.request.draft_choice(company) for share in shares if company]
        draft = common_length(choices)
        for share in shares:
            request = share.request
            if request.finished:
                continue
            try:
                span = request.span(share.rows, draft=draft, layers=share.layers)
            except CacheFullError:
                raise
            except Exception as error:
                self._fail(request, error)
            else:
                share = replace(share, rows=len(span.tokens) - span.drafted)  # it may have others
                work.append(Work(share, span, decoded=request.decoding))
        return work

    def _without_newest(
        self, shares: Sequence[Share[Request]], error: CacheFullError
    ) -> list[Share[Request]]:
        """Take the blocks of the newest request, as the cache is full; returns the other shares."""
        newest = self._scheduler.preempt()
        if newest is not None:
            newest.preempt()
        else:
            newest = shares[0].request
            if shares[0].layers is not None and newest.may_rest:
                newest.may_rest = False  # it takes a block less without parked rows
            else:
                self._fail(newest, error)
        return [share for share in shares if share.request is not newest]

    def _take(self, part: Work, rows: Rows, *, company: int, seconds: float) -> None:
        request = part.request
        try:
            request.take(rows, decoded=part.decoded, company=company, seconds=seconds)
        except BaseException as error:  # of a callback, or a panic of Rust's
            self._fail(request, error)
        if rows.logits:
            self._begin_forks(request, rows)
        if request.finished:
            self.leave(request)

    def _begin_forks(self, request: Request, rows: Rows) -> None:
        """Begin the other answers to a prompt where it ends."""
        rows = Rows(rows.hidden[:0], rows.logits)
        while request.forks:
            fork = request.forks.pop()
            try:
                if not fork.withdrawn:
                    fork.begin_at(request)
                    fork.take(rows, decoded=False, company=0, seconds=0.0)
            except BaseException as error:
                fork.fail(error)
            if fork.finished:
                fork.leave()
            else:
                self.submit(fork)

    def _take_in(self) -> None:
        """Add requests to the scheduler that came, or came back, since the last step."""
        version = self._cache.index.version
        for request in list(self._parked):
            if id(request) not in self._live:
                self._parked.remove(request)
            elif not request.paused:
                self._scheduler.add(request)
                self._parked.remove(request)
        while self._submitted:
            request = self._submitted.popleft()
            if not request.withdrawn:
                self._live[id(request)] = request
                request.context.rest()  # it goes on soon, so its blocks are taken last
                self._scheduler.add(request, findable=_findable(request), version=version)
                for fork in request.forks:
                    fork.asked = request.asked
        self._scheduler.look_up(version, _findable)

    def _end(self) -> None:
        """End requests that were cancelled or ran out of time, or whose session has changed."""
        for request in list(self._live.values()):
            if request.withdrawn:
                self.leave(request)
                continue
            try:
                ended = request.end()
            except BaseException as error:
                self._fail(request, error)
            else:
                if ended:
                    self.leave(request)

    def _policy(self) -> SchedulingPolicy:
        """Return the policy that `EngineOptions.scheduling` names."""
        scheduling, prefill = self._options.scheduling, self._prefill
        rows = prefill.rows_at_once(self._cache.sequence())
        if scheduling == "serial":
            return Serial(max_rows=rows)
        chunk = prefill.chunk_rows
        layered = partial(
            Layered,
            layers=len(self._cache.places),
            resting_rows=max(self._cache.rows_at_once // chunk, 1) * chunk,
            chunk_rows=chunk,
        )
        chosen = layered if scheduling == "layered" else StallFree
        return chosen(
            time_target=self._options.time_target_ms / 1000,
            max_rows=rows,
            # chunks of a static size, or of a GPU, lose more by an earlier end
            lone_rows=_LONE_ROWS if prefill.exact_rows else rows,
            min_rows=min(_MIN_ROWS, rows // 2),
            max_decodes=min(_DECODES, rows // 2),
            row_multiple=self._row_multiple,
        )


def _findable(request: Request) -> int:
    """Return the tokens that a request would begin with; what fails is its beginning's error."""
    try:
        return request.findable
    except Exception:
        return 0


def _company(shares: Sequence[Share[Request]]) -> int:
    """Return the number of sequences, if they decode and are few enough to draft; else 0."""
    few = len(shares) <= _DRAFTING
    return len(shares) if few and all(share.request.decoding for share in shares) else 0


def _should_stop(work: Sequence[Work]) -> Callable[[], bool] | None:
    """Return the function that tells, between layers, whether a long step is no longer needed."""
    if sum(len(part.span.tokens) for part in work) < _MANY_ROWS:
        return None
    return lambda: all(part.request.stop_now() for part in work)
