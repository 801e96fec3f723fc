"""Choice of the next task for an accelerator and the host. Pure Python: tasks run elsewhere.

A chunk goes through the same steps as every other chunk, one after the other: segment on the
accelerator, attention on the host, segment, ... Attention also needs the keys of the chunks before,
so an ordered step waits for the same step of the chunk before it. While one chunk is on the host
another one can be on the accelerator: llm.npu's out-of-order subgraphs (Xu et al.,
arXiv:2407.05858, section 3.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Processor = Literal["accelerator", "host"]
Policy = Literal["serial", "in-order", "out-of-order"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
# Number of chunks on their way at once; each has buffers of its own.
WINDOW = 4


@dataclass(frozen=True)
class Step:
    """A step that every chunk goes through.

    Attributes:
        ordered: whether the step waits for the same step of the chunk before.
    """

    name: str
    processor: Processor
    ordered: bool = False


class Task(NamedTuple):
    """A step of a chunk; both are given by their index."""

    chunk: int
    step: int


def one_by_one(steps: int, chunks: int, *, together: int = 1) -> Iterator[Task]:
    """Iterate the tasks of one prompt in the order of a serial run, one task at a time.

    Args:
        together: number of chunks that go through a step before any of them begins the next step.
    """
    for first in range(0, chunks, together):
        group = range(first, min(first + together, chunks))
        yield from (Task(chunk, step) for step in range(steps) for chunk in group)


class Schedule:
    """The tasks of one prompt, and the choice of the next one for each processor.

    `serial` runs one task at a time. `in-order` keeps both processors to the order of a serial run,
    each for itself. `out-of-order` lets a processor take any ready task, and of several the one
    that brings the accelerator most work soon (`_merit`).

    Args:
        seconds: function that gives the seconds of a task, as far as they are known.
        window: number of chunks that may be on their way at once.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        chunks: int,
        *,
        policy: Policy,
        seconds: Callable[[Task], float],
        window: int = WINDOW,
    ) -> None:
        self._steps = steps
        self._policy = policy
        self._seconds = seconds
        self._window = window
        self._next = [0] * chunks  # for each chunk, the first step that is not finished
        self._running: set[Task] = set()

    @property
    def finished(self) -> bool:
        return not self._next or self._next[-1] == len(self._steps)

    def take(self, processor: Processor) -> Task | None:
        """Take the task that a free processor should begin now; None: it has to wait."""
        if self._policy == "serial" and self._running:
            return None
        ready = [task for task in self._ready() if self._processor(task) == processor]
        if self._policy != "out-of-order":
            ready = [task for task in ready if task == self._first_left(processor)]
        if not ready:
            return None
        task = max(ready, key=lambda task: (self._merit(task), -task.chunk))
        self._running.add(task)
        return task

    def finish(self, task: Task) -> None:
        self._running.remove(task)
        self._next[task.chunk] += 1

    def _processor(self, task: Task) -> Processor:
        return self._steps[task.step].processor

    def _ready(self) -> Iterable[Task]:
        oldest = next((c for c, step in enumerate(self._next) if step < len(self._steps)), 0)
        for chunk in range(oldest, min(oldest + self._window, len(self._next))):
            task = Task(chunk, self._next[chunk])
            if task.step < len(self._steps) and task not in self._running and self._free(task):
                yield task

    def _free(self, task: Task, *, after: Task | None = None) -> bool:
        """Whether the chunk before lets the task begin, `after` counted as finished."""
        if not self._steps[task.step].ordered or task.chunk == 0:
            return True
        before = Task(task.chunk - 1, task.step)
        return before == after or self._next[before.chunk] > before.step

    def _first_left(self, processor: Processor) -> Task | None:
        """Return the processor's first unfinished task in the order of a serial run."""
        for chunk, first in enumerate(self._next):
            for step in range(first, len(self._steps)):
                if self._steps[step].processor == processor:
                    return Task(chunk, step)
        return None

    def _merit(self, task: Task) -> float:
        """Return llm.npu's C(g): the seconds of tasks that become ready on the other processor.

        They count for a task of the host, which feeds the accelerator. They count against a task of
        the accelerator, because the accelerator is to be kept busy.
        """
        other = [t for t in self._freed_by(task) if self._processor(t) != self._processor(task)]
        total = sum(self._seconds(t) for t in other)
        return total if self._processor(task) == "host" else -total

    def _freed_by(self, task: Task) -> Iterable[Task]:
        following = Task(task.chunk, task.step + 1)
        if following.step < len(self._steps) and self._free(following):
            yield following
        waiting = Task(task.chunk + 1, task.step)
        waits = waiting.chunk < len(self._next) and self._next[waiting.chunk] == task.step
        if waits and self._steps[task.step].ordered and self._free(waiting, after=task):
            yield waiting


def simulate(
    steps: Sequence[Step],
    chunks: int,
    *,
    policy: Policy,
    seconds: Callable[[Task], float],
    window: int = WINDOW,
) -> list[tuple[Task, float, float]]:
    """Simulate a run in which tasks take exactly `seconds`; return them with start and end."""
    schedule = Schedule(steps, chunks, policy=policy, seconds=seconds, window=window)
    now, done = 0.0, []
    running: dict[Processor, tuple[Task, float, float]] = {}
    processors: tuple[Processor, ...] = ("accelerator", "host")
    while not schedule.finished:
        for processor in processors:
            if processor not in running:
                task = schedule.take(processor)
                if task is not None:
                    running[processor] = (task, now, now + seconds(task))
        first = min(running, key=lambda processor: running[processor][2])
        done.append(running.pop(first))
        now = done[-1][2]
        schedule.finish(done[-1][0])
    return done
