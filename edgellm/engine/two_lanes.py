"""Steps that decode while an accelerator computes prompts, and the bridge between the two lanes.

DistServe (arXiv:2401.09670) and Splitwise (arXiv:2311.18677) split prefill and decode over
machines; here both work on one KV cache, and only a block table and a length are handed over. The
bound of prefill by decode's time is Nexus' rule (arXiv:2507.06608).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

from edgellm.backends.batch import Backend, Rows
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.cache.kv_cache import KVCache
from edgellm.checks import check_number
from edgellm.engine.batcher import Batcher, Work
from edgellm.engine.plan import Share
from edgellm.engine.prefill_job import PrefillJob
from edgellm.engine.prompt_rows import SchedulingPolicy, StallFree, StepBudget
from edgellm.engine.request import Request
from edgellm.engine.step_costs import StepCosts, StepLoad
from edgellm.engine.thread import EngineThread
from edgellm.errors import CacheFullError
from edgellm.options import EngineOptions

# Weight of what was known of prefill's time when a job has ended.
_KEPT = 0.5
# For `Pace`: decode steps without prefill beside them that show what decode takes, at first and
# later; steps beside prefill after which that is measured again, and the factor by which the number
# of rows may change until then.
_FIRST_ALONE, _ALONE = 8, 2
_TRUSTED_STEPS, _TRUSTED_ROWS = 100, 1.25


@dataclass(frozen=True, kw_only=True)
class TwoDevices(StallFree):
    """Steps decode and nothing else; prompts go to the other device, in the order of `StallFree`.

    Every prompt does, whatever its length and the other requests: its bits do not depend on the
    load.
    """

    def budget(self, *, decodes: int, requests: int) -> StepBudget:
        return StepBudget(0.0, 0, 0)


class Pace:
    """Pace of prefill that makes decode take `slowdown` times as long, and no longer.

    A decode step beside prefill adds to a debt what it took longer than `slowdown` times its time
    alone; a step alone pays back what it might have taken longer. With too much debt prompts wait,
    until all is paid. So decode is that much slower on average and no more, and prompts always go
    on: at the least 1 - 1 / slowdown of the time is theirs. Where prefill costs decode less,
    nothing waits.

    Chunks were measured by themselves. Beside decode, which has the host's cores as well, they take
    longer, by a factor that is learnt: so a job ends within the time target.

    Attributes:
        spaced: whether prompts wait for decode.
    """

    def __init__(self, slowdown: float, costs: StepCosts) -> None:
        """`costs` learns from decode steps alone."""
        check_number("slowdown", slowdown, 1.001)
        self._slowdown = slowdown
        self._costs = costs
        self._stretch = 1.0  # times as long as by itself that a job takes
        self._owed = 0.0
        self.spaced = False
        self._missing = _FIRST_ALONE  # decode steps alone that are needed before more prefill
        self._beside = 0  # steps since the last one alone
        self._rows = 0  # of the last step alone

    def may_prefill(self, *, decodes: bool) -> bool:
        """Whether rows of a prompt may begin now.

        Args:
            decodes: whether anything is decoded meanwhile.
        """
        return not decodes or not (self.spaced or self._missing)

    def expected_within(self, seconds: float) -> float:
        """Return the seconds that a job should take by itself to take `seconds` beside decode."""
        return seconds / self._stretch

    def job(self, expected: float, seconds: float) -> None:
        """Learn from a job that took `seconds`, and would have taken `expected` by itself."""
        if expected > 0:
            new = max(1.0, seconds / expected)
            self._stretch = _KEPT * self._stretch + (1 - _KEPT) * new

    def alone(self, load: StepLoad, seconds: float) -> None:
        """Learn from a decode step without prefill beside it."""
        self._costs.learn(load, seconds)
        self._missing = max(0, self._missing - 1)
        self._beside, self._rows = 0, load.rows
        self._owe(-(self._slowdown - 1) * seconds, seconds)

    def beside(self, load: StepLoad, seconds: float) -> None:
        """Count a decode step that ran while prefill did, or for a part of it."""
        expected = self._costs.seconds(load)
        self._beside += 1
        few, many = sorted((load.rows, self._rows))
        if self._beside >= _TRUSTED_STEPS or many > _TRUSTED_ROWS * few:
            self._missing = max(self._missing, _ALONE)
        self._owe(seconds - self._slowdown * expected, expected)

    def _owe(self, seconds: float, step: float) -> None:
        # hysteresis between a debt of a step's time and no debt, with room for noise
        self._owed = max(-step, self._owed + seconds)
        if self._owed > step:
            self.spaced = True
        elif self._owed <= 0:
            self.spaced = False


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
        self._pace = Pace(options.decode_slowdown, self._scheduler.costs)
        self._beside = False  # this step runs beside prefill, or takes over from it
        self._start = 0.0

    @property
    def has_work(self) -> bool:
        """See `Batcher.has_work`; a lane that computes a prompt needs no steps."""
        if not self._lane.busy or self._submitted:
            return super().has_work
        return any(each.decoding and not each.paused for each in self._scheduler.running)

    @property
    def away(self) -> bool:
        """See `Batcher.away`."""
        return self._lane.busy

    def step(self, *, wake: Callable[[], object]) -> None:
        """See `Batcher.step`."""
        self._start = time.perf_counter()
        wake()  # to make room, a step may wait for the lane
        super().step(wake=wake)

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
        self._pace.job(self._chunks.costs.seconds(plan), run.seconds)
        self._scheduler.count([share])
        self._take(run.work, run.rows.result(), company=0, seconds=run.seconds)

    def _prefill_next(self) -> None:
        """Give the lane rows of the prompt that is first in line."""
        shares = self._planned(self._scheduler.plan_prompt)
        if not shares:
            return
        (share,) = shares
        request = share.request
        try:
            target = self._pace.expected_within(self._options.time_target_ms / 1000)
            rows = self._chunks.rows_within(target, count=share.rows, start=share.start)
            span = request.span(rows, apart=True)
            share = replace(share, rows=len(span.tokens))
            self._lane.begin(Work(share, span, decoded=False))
        except CacheFullError as error:
            self._without_newest([share], error)
        except Exception as error:
            self._fail(request, error)

    def _without_newest(
        self, shares: Sequence[Share[Request]], error: CacheFullError
    ) -> list[Share[Request]]:
        left = super()._without_newest(shares, error)
        self._lane.stop_dropped()
        return left

    def _learn(self, done: Sequence[Work], seconds: float) -> None:
        """Learn the whole step's time: taking over and beginning rows costs decode time as well."""
        load = self._scheduler.count([part.share for part in done])
        seconds = time.perf_counter() - self._start
        if any(part.drafted for part in done):
            return
        if self._beside:
            self._pace.beside(load, seconds)
        else:
            self._pace.alone(load, seconds)

    def _policy(self) -> SchedulingPolicy:
        return TwoDevices(time_target=self._options.time_target_ms / 1000)
