"""Predicted and measured times of a prompt's prefill under each schedule."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Span
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import PlannedChunk
from edgellm.backends.schedule import Policy, Step, Task, simulate
from edgellm.backends.timing import Samples, best_seconds, in_turns, repeated
from edgellm.backends.trace import TaskRecord, bubble_rate
from edgellm.engine import costs
from edgellm.engine.engine import Engine
from edgellm.engine.measured import MeasuredPrompt
from edgellm.engine.one_sequence import Hooks, compute_prompt
from edgellm.errors import CancelledError

# Time for measuring whole prompts more than once.
_PROMPTS_S = 6.0


@dataclass(frozen=True)
class Profile:
    """Seconds of the parts of a prompt, measured on this machine before the prompt is run.

    Attributes:
        steps: steps of every chunk through the layers.
        shallow, deep: seconds of each step, by chunk size, at the start of a sequence and after
            `depth` tokens; in between they grow linearly, as attention does.
        host: seconds of chunks that the host computes, by their number of tokens.
        head: seconds of the LM head for one row.
    """

    steps: Sequence[Step]
    shallow: Mapping[int, Sequence[float]]
    deep: Mapping[int, Sequence[float]]
    depth: int
    host: Mapping[int, float]
    head: float

    def seconds(self, size: int, step: int, start: int) -> float:
        share = min(1.0, start / self.depth) if self.depth else 0.0
        low, high = self.shallow[size][step], self.deep[size][step]
        return low + max(0.0, high - low) * share


@dataclass(frozen=True)
class Prediction:
    """Prediction of a prompt's prefill.

    Attributes:
        seconds: seconds to the first token.
        bubbles: share of the time in which the accelerator is idle.
    """

    seconds: float
    bubbles: float


def profile(
    engine: Engine,
    backend: ChunkedBackend,
    plan: Sequence[PlannedChunk],
    *,
    stop: threading.Event,
) -> Profile:
    """Time the parts of a planned prompt, each once or a few times.

    Raises:
        CancelledError: `stop` was set.
    """
    model, sequence = backend.model, engine.cache.sequence()
    sizes = sorted({chunk.size for chunk in plan if chunk.size is not None})
    depth = max(0, sum(chunk.count for chunk in plan) - max(sizes, default=0))

    def step_seconds(size: int, start: int) -> list[float]:
        if stop.is_set():
            raise CancelledError("the measurement was stopped")
        tokens = [0] * min(size, engine.ctx_size - start)
        runs = repeated(lambda: model.profile(tokens, sequence, size=size, start=start))
        return [min(times) for times in zip(*(steps for _, steps in runs), strict=True)]

    def host_seconds(count: int) -> float:
        def run() -> None:
            assert backend.host is not None
            try:
                backend.host.run([Span(sequence, [0] * count)])
            finally:
                sequence.truncate(0)

        return best_seconds(run)

    row = model.head.embed([0])
    return Profile(
        model.steps,
        {size: step_seconds(size, 0) for size in sizes},
        {size: step_seconds(size, depth) for size in sizes},
        depth,
        {n: host_seconds(n) for n in sorted({p.count for p in plan if p.size is None})},
        best_seconds(lambda: model.head.logits(row)),
    )


def predict(
    measured: Profile,
    plan: Sequence[PlannedChunk],
    policy: Policy,
    *,
    accelerator_speed: float = 1.0,
) -> Prediction:
    """Simulate a planned prompt under a schedule.

    Args:
        accelerator_speed: speed of the accelerator, in multiples of the measured one.
    """
    start, now = 0, 0.0
    records: list[TaskRecord] = []
    for on_host, group in itertools.groupby(plan, lambda chunk: chunk.size is None):
        chunks = list(group)
        if on_host:
            now += sum(measured.host[chunk.count] for chunk in chunks)
            start += sum(chunk.count for chunk in chunks)
            continue
        starts = list(itertools.accumulate((chunk.count for chunk in chunks), initial=start))
        seconds = _task_seconds(measured, chunks, starts, accelerator_speed)
        done = simulate(measured.steps, len(chunks), policy=policy, seconds=seconds)
        for task, begin, end in done:
            step = measured.steps[task.step]
            times = (now + begin, now + end)
            records.append(TaskRecord(step.name, task.chunk, step.processor, *times))
        start, now = starts[-1], now + done[-1][2]
    return Prediction(now + measured.head, bubble_rate(records))


def _task_seconds(
    measured: Profile, chunks: Sequence[PlannedChunk], starts: Sequence[int], speed: float
) -> Callable[[Task], float]:
    def seconds(task: Task) -> float:
        size = chunks[task.chunk].size
        assert size is not None
        taken = measured.seconds(size, task.step, starts[task.chunk])
        return taken / speed if measured.steps[task.step].processor == "accelerator" else taken

    return seconds


def measure(
    engine: Engine, count: int, *backends: Backend, stop: threading.Event
) -> list[tuple[Samples, float]]:
    """Time a prompt of `count` tokens through each back end, in turns, until `stop` is set.

    Returns:
        For each back end the seconds to the logits after the prompt, and the accelerator's idle
        share.
    """
    tokens = [(31 * i + 7) % engine.config.vocab_size for i in range(count)]
    bubbles = [0.0] * len(backends)

    def run(index: int) -> None:
        sequence, records = engine.cache.sequence(), list[TaskRecord]()
        try:
            hooks = Hooks(cancel=stop, on_tasks=records.extend)
            compute_prompt(backends[index], tokens, sequence, hooks)
        finally:
            sequence.truncate(0)
        bubbles[index] = bubble_rate(records)

    runs = {index: partial(run, index) for index in range(len(backends))}
    samples = in_turns(runs, times=3, limit_s=_PROMPTS_S)
    return [(samples[index], bubbles[index]) for index in runs]


def keep_prompt(engine: Engine, prompt: MeasuredPrompt) -> None:
    """Keep the times of a whole prompt for `--prefill auto`; see `costs.keep_prompt`."""
    if isinstance(engine.prefill, ChunkedBackend) and engine.options.precision is None:
        model, threads = engine.prefill.model, engine.threads
        costs.keep_prompt(engine.bundle.path, model, engine.decoder, prompt, threads=threads)
