"""Runs the tasks of a prompt on two processors and notes what ran when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from edgellm.errors import CancelledError
from edgellm.schedule import Policy, Processor, Schedule, Step, Task
from edgellm.trace import TaskRecord

Run = Callable[[Task], None]


def execute(
    steps: Sequence[Step],
    chunks: int,
    run: Run,
    *,
    policy: Policy,
    seconds: Callable[[Task], float],
    cancel: threading.Event | None = None,
) -> list[TaskRecord]:
    """Run every task; gives them in the order in which they ended.

    The calling thread is the host, and a thread of its own waits for the accelerator; `serial`
    needs no second one. Results do not depend on the policy.

    Raises:
        CancelledError: `cancel` was set; no task is running any more.
        Exception: whatever `run` raised, once the other processor is idle.
    """
    job = _Job(steps, run, cancel)
    if policy == "serial":
        for chunk in range(chunks):
            for step in range(len(steps)):
                job.perform(Task(chunk, step))
    elif chunks:
        shared = _Shared(job, Schedule(steps, chunks, policy=policy, seconds=seconds))
        accelerator = threading.Thread(target=shared.work, args=("accelerator",))
        accelerator.start()
        shared.work("host")
        accelerator.join()
        if shared.error is not None:
            raise shared.error
    return job.records


class _Job:
    def __init__(self, steps: Sequence[Step], run: Run, cancel: threading.Event | None) -> None:
        self._steps = steps
        self._run = run
        self._cancel = cancel
        self.records: list[TaskRecord] = []

    def perform(self, task: Task) -> None:
        if self._cancel is not None and self._cancel.is_set():
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
        self.error: BaseException | None = None

    def work(self, processor: Processor) -> None:
        """Be this processor until all is done or something went wrong."""
        while (task := self._wait_for_task(processor)) is not None:
            error: BaseException | None = None
            try:
                self._job.perform(task)
            except BaseException as raised:
                error = raised
            with self._changed:
                self._schedule.finish(task)
                self.error = self.error or error
                self._changed.notify_all()

    def _wait_for_task(self, processor: Processor) -> Task | None:
        with self._changed:
            while self.error is None and not self._schedule.finished:
                task = self._schedule.take(processor)
                if task is not None:
                    return task
                self._changed.wait()
        return None
