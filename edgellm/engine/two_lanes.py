"""Steps that decode while an accelerator computes prompts, and the bridge between the two lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Rows, Span
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.cache.growth import Growth
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.batcher import Batcher, Work
from edgellm.engine.plan import Share
from edgellm.engine.request import Request
from edgellm.engine.scheduler import Scheduler
from edgellm.engine.step_costs import StepCosts
from edgellm.engine.thread import EngineThread
from edgellm.engine.two_devices import JobTime, Pace, TwoDevices
from edgellm.errors import CacheFullError
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.options import EngineOptions


class PrefillJob:
    """Rows of a prompt that the prefill lane computes.

    Attributes:
        request: request of the prompt.
        span: the rows, at the end of `growth`.
        growth: sequence that the rows go to, until it is attached to the request's sequence.
        rows: results; None where `error` says why there are none.
        seconds: seconds that the job took.
    """

    def __init__(self, request: Request, span: Span) -> None:
        """See `Growth` for the exceptions."""
        self.request = request
        self.growth = Growth(span.sequence, len(span.tokens))
        self.span = replace(span, sequence=self.growth)
        self.rows: Rows | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._base = span.sequence
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether the job has ended, so that `growth` is no longer written to."""
        return self._ended.is_set()

    @property
    def obsolete(self) -> bool:
        """Whether the request is over, or its sequence no longer ends where the job begins."""
        request, base = self.request, self._base
        moved = request.context.sequence is not base or len(base) != self.growth.start
        return request.finished or request.withdrawn or moved

    def run(self, backend: Backend) -> None:
        """Compute the rows."""
        start = time.perf_counter()
        try:
            (self.rows,) = backend.run([self.span], should_stop=self._should_stop)
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - start
        self._ended.set()

    def wait(self) -> None:
        """Wait for the end."""
        self._ended.wait()

    def _should_stop(self) -> bool:
        return self.obsolete or self.request.stop_now()


class PrefillLane:
    """Runner of one job after the other; all is for the engine's thread."""

    def __init__(self, thread: EngineThread, backend: Backend) -> None:
        """`thread` is told when a job has ended."""
        self._thread = thread
        self._backend = backend
        self._job: PrefillJob | None = None

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return self._job is not None and not self._job.ended

    @property
    def free(self) -> bool:
        """Whether there is no job, not even one that has ended and was not taken."""
        return self._job is None

    def begin(self, job: PrefillJob) -> None:
        """Start a job, when `free`.

        Raises:
            RuntimeError: no more threads can be started.
        """
        # no daemon: the end of the program waits for the end of a chunk
        thread = threading.Thread(target=self._run, args=(job,), name="edgellm-prefill")
        try:
            thread.start()
        except RuntimeError:
            job.growth.close()
            raise
        self._job = job

    def take(self) -> PrefillJob | None:
        """Return the job if it has ended, and forget it; else None."""
        job = self._job
        if job is None or not job.ended:
            return None
        self._job = None
        return job

    def stop_obsolete(self) -> None:
        """Drop an obsolete job and free its blocks; waits for its end, if need be."""
        if self._job is not None and self._job.obsolete:
            self._job.wait()
            self.drop_obsolete()

    def drop_obsolete(self) -> None:
        """Drop an obsolete job if it has ended; else its thread has it dropped at its end."""
        job = self._job
        if job is not None and job.ended and job.obsolete:
            job.growth.land().close()  # computed blocks can still be found
            self._job = None

    def _run(self, job: PrefillJob) -> None:
        job.run(self._backend)
        del job  # the thread that takes it has the only reference
        self._thread.soon(self.drop_obsolete)


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
        self._lane.drop_obsolete()

    def fail_all(self, error: BaseException) -> None:
        """See `Batcher.fail_all`."""
        super().fail_all(error)
        self._lane.drop_obsolete()

    def _next(self) -> list[Share[Request]]:
        job = self._lane.take()
        if job is not None:
            self._take_over(job)
        shares = super()._next()
        if self._lane.free and self._pace.may_prefill(decodes=bool(shares)):
            self._prefill_next()
        # the time of taking over is no part of decode alone
        self._beside = job is not None or self._lane.busy
        # to make room for a prompt, the newest request may have lost its place
        return [share for share in shares if share.request in self._scheduler.running]

    def _take_over(self, job: PrefillJob) -> None:
        """Attach the rows that the lane has computed, where they are still wanted."""
        sequence = job.growth.land()
        if job.obsolete:
            return sequence.close()
        request, start = job.request, job.growth.start
        request.context.take_over(sequence)
        if job.error is not None:
            # a request that was stopped a moment ago ends as such with the next step
            return None if request.stop_now() else self._fail(request, job.error)
        assert job.rows is not None
        plan = self._chunks.plan(len(job.span.tokens), start)
        self._job_time.learn(self._chunks.costs.seconds(plan), job.seconds)
        share = Share(request, start, len(job.span.tokens), decode=False)
        self._scheduler.count([share])
        work = Work(share, job.span, decoded=False)
        self._take(work, job.rows, alone=False, seconds=job.seconds)

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
            span = request.span(rows, alone=False)
            self._lane.begin(PrefillJob(request, span))
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
        self._lane.stop_obsolete()
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
