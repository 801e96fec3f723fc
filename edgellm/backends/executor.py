"""Execution of a prompt's tasks on two processors, with a record of what ran when."""

from __future__ import annotations

import _thread
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
        BaseException: an error of `run`, or an interrupt that came while the host waited; raised
            once the other processor is idle.
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
        self._lock = threading.Lock()
        # A processor's lock is free when there may be a new task for it. Bare locks: `Condition` is
        # Python, and an interrupt between two of its lines would leave its lock taken, or let go of
        # twice.
        self._news: dict[Processor, threading.Lock] = {
            "accelerator": threading.Lock(),
            "host": threading.Lock(),
        }
        self._error: BaseException | None = None
        self._accelerator_began = self._accelerator_ended = False

    def run(self) -> None:
        """Work as the host, beside a thread for the accelerator, until both are idle."""
        try:
            # no `threading.Thread`: it starts and ends in Python, where an interrupt comes out as
            # an error of a lock, or is lost; and it would keep the process alive whatever happens
            _thread.start_new_thread(self._accelerate, ())
            self._work("host")
            self._wait_for_accelerator()
        except BaseException as interrupt:
            self._stop_all(interrupt)
            raise
        if self._error is not None:
            raise self._error

    def _accelerate(self) -> None:
        with self._lock:
            self._accelerator_began = True
        self._work("accelerator")
        with self._lock:
            self._accelerator_ended = True
            self._tell_both()

    def _work(self, processor: Processor) -> None:
        """Perform the tasks of one processor until all are done or one has failed."""
        try:
            while (task := self._wait_for_task(processor)) is not None:
                self._job.perform(task)
                with self._lock:
                    self._schedule.finish(task)
                    self._tell_both()
        except BaseException as error:
            self._stop(error)

    def _wait_for_task(self, processor: Processor) -> Task | None:
        while True:
            with self._lock:
                if self._error is not None or self._schedule.finished:
                    return None
                task = self._schedule.take(processor)
            if task is not None:
                return task
            self._news[processor].acquire()

    def _tell_both(self) -> None:
        """Have both processors look for a task again, now or before they next wait.

        The caller holds `_lock`.
        """
        for news in self._news.values():
            if news.locked():
                news.release()

    def _stop(self, error: BaseException) -> None:
        """Keep both processors from beginning another task; the first error is kept."""
        with self._lock:
            self._error = self._error or error
            self._tell_both()

    def _stop_all(self, error: BaseException) -> None:
        """Stop both processors and wait for the accelerator's task, despite further interrupts.

        The task uses buffers that the caller will use again.
        """
        while True:
            try:
                self._stop(error)
                # a thread that begins later finds the error, and takes no task
                if self._accelerator_began:
                    self._wait_for_accelerator()
                return
            except BaseException:  # raised by a signal handler
                continue

    def _wait_for_accelerator(self) -> None:
        while not self._accelerator_ended:
            self._news["host"].acquire()
