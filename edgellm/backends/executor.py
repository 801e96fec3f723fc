"""Execution of a prompt's tasks on two processors, with a record of what ran when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from edgellm.backends.schedule import Policy, Processor, Schedule, Step, Task, one_by_one
from edgellm.backends.trace import TaskRecord
from edgellm.errors import CancelledError

Run = Callable[[Task], None]


def execute(
    steps: Sequence[Step],
    chunks: int,
    run: Run,
    *,
    policy: Policy,
    seconds: Callable[[Task], float],
    together: int = 1,
    should_stop: Callable[[], bool] | None = None,
) -> list[TaskRecord]:
    """Run every task; return their records in the order in which the tasks ended.

    The calling thread is the host, and another thread waits for the accelerator; `serial` needs no
    second thread. Results do not depend on the policy.

    Args:
        together: chunks that `serial` takes through a step together, see `one_by_one`.

    Raises:
        CancelledError: `should_stop` returned true; no task is still running.
        BaseException: an error of `run`; raised once the other processor is idle.
    """
    job = _Job(steps, run, should_stop)
    if policy == "serial":
        for task in one_by_one(len(steps), chunks, together=together):
            job.perform(task)
    elif chunks:
        _Shared(job, Schedule(steps, chunks, policy=policy, seconds=seconds)).run()
    return job.records


class _Job:
    def __init__(
        self, steps: Sequence[Step], run: Run, should_stop: Callable[[], bool] | None
    ) -> None:
        self._steps = steps
        self._run = run
        self._should_stop = should_stop
        self.records: list[TaskRecord] = []

    def perform(self, task: Task) -> None:
        if self._should_stop is not None and self._should_stop():
            raise CancelledError("cancelled between two layers")
        start = time.perf_counter()
        self._run(task)
        end, step = time.perf_counter(), self._steps[task.step]
        self.records.append(TaskRecord(step.name, task.chunk, step.processor, start, end))


class _Shared:
    """A job that two threads work on."""

    def __init__(self, job: _Job, schedule: Schedule) -> None:
        self._job = job
        self._schedule = schedule
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Work as the host, beside a thread for the accelerator, until both are idle."""
        accelerator = threading.Thread(target=self._work, args=("accelerator",))
        accelerator.start()
        self._work("host")
        accelerator.join()  # its task uses buffers that the caller will use again
        if self._error is not None:
            raise self._error

    def _work(self, processor: Processor) -> None:
        """Perform the tasks of one processor until all are done or one has failed."""
        try:
            while (task := self._wait_for_task(processor)) is not None:
                self._job.perform(task)
                with self._changed:
                    self._schedule.finish(task)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait_for_task(self, processor: Processor) -> Task | None:
        with self._changed:
            while self._error is None and not self._schedule.finished:
                task = self._schedule.take(processor)
                if task is not None:
                    return task
                self._changed.wait()
            return None
