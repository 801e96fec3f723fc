"""Steps that decode while an accelerator computes prompts, and the bridge between the two lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Rows
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.batcher import Batcher, Work
from edgellm.engine.plan import Share
from edgellm.engine.prefill_job import PrefillJob
from edgellm.engine.request import Request
from edgellm.engine.scheduler import Scheduler
from edgellm.engine.step_costs import StepCosts
from edgellm.engine.thread import EngineThread
from edgellm.engine.two_devices import JobTime, Pace, TwoDevices
from edgellm.errors import CacheFullError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.options import EngineOptions


class PrefillLane:
    """Runner of one prefill job after the other; all is for the engine's thread."""

    def __init__(self, thread: EngineThread, backend: Backend) -> None:
        """`thread` is told when a job has ended."""
        self._thread = thread
        self._backend = backend
        self._run: _Run | None = None

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return self._run is not None and not self._run.rows.done()

    @property
    def free(self) -> bool:
        """Whether there is no job, not even one that has ended and was not taken."""
        return self._run is None

    def begin(self, work: Work) -> None:
        """Start the job of a request, when `free`.

        Raises:
            RuntimeError: no more threads can be started.
        """
        job = work.request.job
        assert job is not None
        run = _Run(work, job)
        # no daemon: the end of the program waits for the end of a chunk
        thread = threading.Thread(target=self._compute, args=(run,), name="edgellm-prefill")
        thread.start()
        job.away, self._run = True, run

    def take(self) -> _Run | None:
        """Return the job if it has ended, and forget it; else, or if it was dropped, None."""
        run = self._run
        if run is None or not run.rows.done():
            return None
        self._run = None
        run.job.returned()
        return None if run.job.dropped else run

    def settle(self) -> None:
        """Forget a dropped job that has ended, and free its blocks."""
        if self._run is not None and self._run.job.dropped:
            self.take()

    def stop_dropped(self) -> None:
        """Forget a dropped job, and free its blocks; waits for its end, if need be."""
        if self._run is not None and self._run.job.dropped:
            wait([self._run.rows])
            self.take()

    def _compute(self, run: _Run) -> None:
        start = time.perf_counter()
        try:
            (rows,) = self._backend.run([run.work.span], should_stop=run.should_stop)
        except BaseException as error:
            run.rows.set_exception(error)
        else:
            run.seconds = time.perf_counter() - start
            run.rows.set_result(rows)
        del run  # the engine's thread has the only reference
        self._thread.soon(self.settle)


@dataclass
class _Run:
    """Prefill job in the lane; `seconds`: seconds that it took."""

    work: Work
    job: PrefillJob
    rows: Future[Rows] = field(default_factory=Future)
    seconds: float = 0.0

    def should_stop(self) -> bool:
        return self.job.dropped or self.work.request.stop_now()


class TwoLaneBatcher(Batcher):
    """A `Batcher` whose steps decode, while rows of prompts go through the prefill lane.

    A step takes over the rows of a job that has ended, gives the lane the next rows, and decodes. A
    prompt is cut into the same chunks whatever the load, and its chunks hold no rows of others.
    """

    def __init__(
        self,
        thread: EngineThread,
        cache: KVCache,
        options: EngineOptions,
        *,
        prefill: ChunkedBackend,
        decoder: Backend,
    ) -> None:
        """`thread` is told when a step has something to take over."""
        super().__init__(cache, options, prefill=prefill, decoder=decoder)
        self._chunks = prefill
        self._lane = PrefillLane(thread, prefill)
        self._pace = Pace(options.decode_slowdown)
        self._job_time = JobTime()
        self._beside = False  # this step runs beside prefill, or takes over from it
        self._start = 0.0

    @property
    def has_work(self) -> bool:
        """See `Batcher.has_work`; a lane that computes a prompt needs no steps."""
        if not self._lane.busy or self._submitted:
            return super().has_work
        return any(each.decoding and not each.paused for each in self._live.values())

    @property
    def away(self) -> bool:
        """See `Batcher.away`."""
        return self._lane.busy

    def step(self) -> None:
        """See `Batcher.step`."""
        self._start = time.perf_counter()
        super().step()

    def leave(self, request: Request) -> None:
        """See `Batcher.leave`."""
        super().leave(request)
        self._lane.settle()

    def fail_all(self, error: BaseException) -> None:
        """See `Batcher.fail_all`."""
        super().fail_all(error)
        self._lane.settle()

    def _next(self) -> list[Share[Request]]:
        run = self._lane.take()
        if run is not None:
            self._take_over(run)
        shares = super()._next()
        if self._lane.free and self._pace.may_prefill(decodes=bool(shares)):
            self._prefill_next()
        # the time of taking over is no part of decode alone
        self._beside = run is not None or self._lane.busy
        # to make room for a prompt, the newest request may have lost its place
        return [share for share in shares if share.request in self._scheduler.running]

    def _take_over(self, run: _Run) -> None:
        """Give a request the rows that the lane has computed, if it still wants them."""
        share, request = run.work.share, run.work.request
        error = run.rows.exception()
        if error is not None:
            # a request that was stopped a moment ago ends as such with the next step
            return None if request.stop_now() else self._fail(request, error)
        plan = self._chunks.plan(share.rows, share.start)
        self._job_time.learn(self._chunks.costs.seconds(plan), run.seconds)
        self._scheduler.count([share])
        self._take(run.work, run.rows.result(), alone=False, seconds=run.seconds)

    def _prefill_next(self) -> None:
        """Give the lane rows of the prompt that is first in line."""
        share = self._next_prompt()
        # a request that was preempted may be back with all that it had
        while share is not None and share.request.decoding:
            share = self._next_prompt()
        if share is None:
            return
        request = share.request
        try:
            target = self._job_time.expected_within(self._options.time_target_ms / 1000)
            rows = self._chunks.rows_within(target, count=share.rows, start=share.start)
            span = request.span(rows, alone=False, apart=True)
            share = replace(share, rows=len(span.tokens))
            self._lane.begin(Work(share, span, decoded=False))
        except CacheFullError as error:
            self._without_newest([share], error)
        except Exception as error:
            self._fail(request, error)

    def _next_prompt(self) -> Share[Request] | None:
        """Return all that is left of the prompt first in line, if it has room."""
        shares = self._begun(self._scheduler.plan_prompt(self._cache.free_blocks))
        return shares[0] if shares else None

    def _without_newest(
        self, shares: Sequence[Share[Request]], error: CacheFullError
    ) -> list[Share[Request]]:
        left = super()._without_newest(shares, error)
        self._lane.stop_dropped()
        return left

    def _learn(self, done: Sequence[Share[Request]], seconds: float) -> None:
        """Learn the whole step's time: taking over and beginning rows costs decode time as well."""
        load = self._scheduler.count(done)
        seconds = time.perf_counter() - self._start
        if self._beside:
            self._pace.beside(load, seconds)
        else:
            self._pace.alone(load, seconds)

    def _new_scheduler(self) -> Scheduler[Request]:
        policy = TwoDevices(time_target=self._options.time_target_ms / 1000)
        return Scheduler(policy=policy, costs=StepCosts(), block_size=BLOCK)
