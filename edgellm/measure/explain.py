"""Explanation of a prompt's prefill in a loaded model, and of its limits, for `edgellm plan`.

Every function takes `LLM.engine`, and measures in the engine's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import PlannedChunk
from edgellm.backends.providers import CUDA
from edgellm.backends.registry import AUTO, NATIVE, TRITON
from edgellm.backends.schedule import POLICIES, Policy
from edgellm.backends.timing import Samples
from edgellm.engine.auto_prefill import AutoChoice, auto_choice
from edgellm.engine.engine import Engine
from edgellm.engine.measured import MeasuredPrompt
from edgellm.measure.plan import Prediction, keep_prompt, measure, predict, profile
from edgellm.measure.roofline import Machine, Work, measure_cpu, measure_gpu, work_of
from edgellm.store.manifest import PACKED

# Speeds of imagined accelerators, in multiples of the measured one.
_SPEEDS = (1, 5, 10)

__all__ = [
    "Forecast",
    "Limits",
    "Machine",
    "PlannedChunk",
    "TimedPrompt",
    "chunks_of",
    "forecasts",
    "limits",
    "time_prompt",
    "usual_choice",
]


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
    prefill, native = engine.prefill, engine.native_prefill
    name, schedule = prefill.placement.provider, engine.selection.policy
    backends = [prefill] if native is None or name == NATIVE else [prefill, native]
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
