"""Explanation of a prompt's prefill in a loaded model, and of its limits, for `edgellm plan`.

Every function takes `LLM.engine`, and measures in the engine's thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil

from edgellm.backends.batch import Backend, Span
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import MeasuredPrompt, PlannedChunk, Samples
from edgellm.backends.providers import CUDA
from edgellm.backends.registry import AUTO, NATIVE, TRITON
from edgellm.backends.schedule import POLICIES, Policy, Step, Task, simulate
from edgellm.backends.trace import TaskRecord, bubble_rate
from edgellm.engine import costs
from edgellm.engine.auto_backend import AutoChoice, auto_choice
from edgellm.engine.costs import best_seconds, in_turns, repeated
from edgellm.engine.engine import Engine
from edgellm.engine.one_sequence import Hooks, compute_prompt
from edgellm.errors import CancelledError
from edgellm.measure.roofline import Machine, Work, measure_cpu, measure_gpu, work_of
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PACKED

__all__ = [
    "Forecast",
    "Limits",
    "Machine",
    "PlannedChunk",
    "Resident",
    "TimedPrompt",
    "chunks_of",
    "forecasts",
    "limits",
    "resident",
    "time_prompt",
    "usual_choice",
]

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


# Speeds of imagined accelerators, in multiples of the measured one.
_SPEEDS = (1, 5, 10)


@dataclass(frozen=True)
class Forecast:
    """Predicted time of a prompt under a schedule.

    Attributes:
        accelerator_speed: speed of the imagined accelerator, in multiples of the measured one.
    """

    schedule: Policy
    accelerator_speed: int
    prediction: Prediction


@dataclass(frozen=True)
class TimedPrompt:
    """Measured times of a prompt's prefill.

    Attributes:
        prefill: back end of the prefill.
        schedule: schedule of its chunks on accelerator and host; None without chunks.
        seconds: seconds of each repetition.
        bubbles: share of the time in which the accelerator was idle.
    """

    prefill: str
    schedule: Policy | None
    seconds: Samples
    bubbles: float


@dataclass(frozen=True)
class Limits:
    """Limits of the processors of prefill and decode, and the work that the model asks of them."""

    prefill: Machine
    decode: Machine
    work: Work


@dataclass(frozen=True)
class Resident:
    """Bytes of this process that are in memory.

    Attributes:
        mapped: bytes of the files of a bundle that are mapped, by folder; empty where the system
            does not tell. A file that is mapped twice counts twice, here and in `total`.
    """

    total: int
    mapped: Mapping[str, int]


def resident(bundle: Bundle) -> Resident:
    """Measure what this process has in memory, and what of it is mapped from a bundle's files."""
    process = psutil.Process()
    folders = {str((bundle.path / name).resolve()): name for name in bundle.manifest.files}
    mapped: dict[str, int] = {}
    # macOS has no such list
    for file in process.memory_maps() if hasattr(process, "memory_maps") else ():
        if file.path in folders and file.rss:
            folder = folders[file.path].partition("/")[0]
            mapped[folder] = mapped.get(folder, 0) + file.rss
    return Resident(process.memory_info().rss, mapped)


def chunks_of(engine: Engine, count: int) -> list[PlannedChunk]:
    """Return the chunks of a prompt of `count` tokens; none where back ends do not use chunks."""
    prefill = engine.prefill
    return prefill.plan(count) if isinstance(prefill, ChunkedBackend) else []


def forecasts(engine: Engine, chunks: Sequence[PlannedChunk]) -> Iterator[Forecast]:
    """Measure the parts of a prompt, and simulate the prompt under every schedule."""
    prefill = engine.prefill
    if not isinstance(prefill, ChunkedBackend):
        return
    stop = threading.Event()
    profiled = engine.thread.call(lambda: profile(engine, prefill, chunks, stop=stop), stop=stop)
    for speed in _SPEEDS:
        for schedule in POLICIES:
            prediction = predict(profiled, chunks, schedule, accelerator_speed=speed)
            yield Forecast(schedule, speed, prediction)


def time_prompt(engine: Engine, count: int) -> list[TimedPrompt]:
    """Time a prompt of `count` tokens through the prefill back end and the native kernels.

    Both run in turns, and their times are kept, so that `prefill` auto knows next time which one
    was faster. If prefill is native, or there are no native kernels, prefill runs alone.
    """
    prefill, decoder = engine.prefill, engine.decoder
    name, schedule = prefill.placement.provider, engine.selection.policy
    backends = [prefill, decoder] if decoder.name == NATIVE != name else [prefill]
    stop = threading.Event()
    times = engine.thread.call(lambda: measure(engine, count, *backends, stop=stop), stop=stop)
    (seconds, bubbles), *others = times
    if not others:
        return [TimedPrompt(name, schedule, seconds, bubbles)]
    ((alone, _),) = others
    keep_prompt(engine, MeasuredPrompt(count, seconds, alone))
    return [
        TimedPrompt(name, schedule, seconds, bubbles),
        TimedPrompt(NATIVE, None, alone, 0.0),
    ]


def limits(engine: Engine, count: int) -> Limits:
    """Measure arithmetic and memory of the processors of prefill and decode.

    Args:
        count: tokens of the prompt.
    """
    prefill, decoder = engine.prefill, engine.decoder

    def machine(backend: str, precision: str) -> Machine:
        if backend in (TRITON, CUDA):
            return measure_gpu()
        return measure_cpu(engine.threads, int4=precision == PACKED)

    work = work_of(
        engine.bundle, count, precision=decoder.precision, kv_format=engine.options.kv_format
    )
    return engine.thread.call(
        lambda: Limits(
            machine(prefill.placement.provider, prefill.precision),
            machine(decoder.name, decoder.precision),
            work,
        )
    )


def usual_choice(engine: Engine) -> AutoChoice:
    """Return the back end that `prefill` auto takes for this model, and the reason."""
    return auto_choice(engine.bundle, replace(engine.options, prefill=AUTO, precision=None))
