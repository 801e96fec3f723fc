"""`edgellm plan`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import click

from edgellm.backends.providers import CUDA
from edgellm.backends.registry import AUTO, NATIVE, TRITON
from edgellm.backends.schedule import POLICIES
from edgellm.backends.timing import Samples
from edgellm.cli.options import load_options
from edgellm.cli.progress import progress_bar
from edgellm.engine.auto_prefill import auto_choice
from edgellm.engine.engine import DEFAULT_CTX_SIZE, Engine
from edgellm.engine.measured import MeasuredPrompt
from edgellm.engine.planner import PlannedChunk
from edgellm.engine.prefill import ChunkedPrefill
from edgellm.errors import OptionError
from edgellm.llm import load
from edgellm.measure.plan import Prediction, keep_prompt, measure, predict, profile
from edgellm.measure.roofline import Machine, measure_cpu, measure_gpu, work_of
from edgellm.options import EngineArguments
from edgellm.store.bundle import PACKED
from edgellm.store.sources import DEFAULT_MODEL

_SPEEDS = (1, 5, 10)


@click.command()
@click.argument("prompt_length", type=click.IntRange(min=1))
@click.option("-m", "--model", "name", default=DEFAULT_MODEL, help="As with `edgellm run`.")
@load_options
def plan(*, prompt_length: int, name: str, load_arguments: EngineArguments) -> None:
    """Explain how a prompt of PROMPT_LENGTH tokens is prefilled, and what limits it."""
    if load_arguments["ctx_size"] is None and prompt_length > DEFAULT_CTX_SIZE:
        load_arguments["ctx_size"] = prompt_length
    with progress_bar() as progress:
        engine = load(name, **load_arguments, progress=progress).engine
    if prompt_length > engine.ctx_size:
        raise OptionError(
            f"a prompt of {prompt_length} tokens does not fit into a context of "
            f"{engine.ctx_size}; raise --ctx-size"
        )
    prefill = engine.prefill
    click.echo(
        f"{engine.bundle.manifest.name}, {prompt_length} tokens: prefill {prefill.placement} "
        f"({prefill.precision}), decode {engine.decoder.name}, {engine.threads} threads"
    )
    with engine.lock:
        if isinstance(prefill, ChunkedPrefill):
            _show_chunks(engine, prefill, prompt_length)
        _show_measured(engine, prompt_length)
        _show_limits(engine, prompt_length)
    choice = auto_choice(engine.bundle, replace(engine.options, prefill=AUTO, precision=None))
    click.echo(f"--prefill auto takes {choice.prefill}: {choice.reason}")


def _show_chunks(engine: Engine, prefill: ChunkedPrefill, count: int) -> None:
    chunks = prefill.plan(count)
    click.echo(f"chunks: {_plan_text(chunks)}")
    profiled = profile(engine, prefill, chunks)
    for speed in _SPEEDS:
        if speed > 1:
            click.echo(f"with an accelerator {speed} times as fast:")
        for policy in POLICIES:
            prediction = predict(profiled, chunks, policy, accelerator_speed=speed)
            click.echo(_line(f"predicted, {policy}", prediction, count))


def _show_measured(engine: Engine, count: int) -> None:
    """The prompt as it is prefilled and, if that is something else, through the native kernels."""
    prefill, native = engine.prefill, engine.native_prefill
    label, name = f"measured, {engine.selection.policy}", prefill.placement.provider
    if native is None or name == NATIVE:
        ((seconds, bubbles),) = measure(engine, count, prefill)
        click.echo(_line(label, Prediction(min(seconds), bubbles), count))
        return
    (seconds, bubbles), (alone, _) = measure(engine, count, prefill, native)
    click.echo(_line(label, Prediction(min(seconds), bubbles), count))
    click.echo(_line("measured, --prefill native", Prediction(min(alone), 0.0), count))
    click.echo(f"faster at this length: {_faster({name: seconds, NATIVE: alone})}")
    keep_prompt(engine, MeasuredPrompt(count, seconds, alone))


def _faster(samples: Mapping[str, Samples]) -> str:
    first, second = sorted(samples, key=lambda name: min(samples[name]))
    if max(samples[first]) < min(samples[second]):
        return f"--prefill {first}"
    return f"{first} and {second} differ by no more than their times vary"


def _show_limits(engine: Engine, count: int) -> None:
    def machine(provider: str, precision: str) -> Machine:
        if provider in (TRITON, CUDA):
            return measure_gpu()
        return measure_cpu(engine.threads, int4=precision == PACKED)

    prefill, decoder = engine.prefill, engine.decoder
    work = work_of(
        engine.bundle, count, precision=decoder.precision, kv_format=engine.options.kv_format
    )
    limits = machine(prefill.placement.provider, prefill.precision)
    click.echo(
        f"limits: prefill {limits.flops / 1e9:.0f} GFLOP/s ({limits.kind}), "
        f"{work.prefill_flops / 1e9:.3f} GFLOP a token: "
        f"{limits.flops / work.prefill_flops:.0f} t/s"
    )
    limits, share = machine(decoder.name, decoder.precision), work.weight_share
    click.echo(
        f"        decode {limits.read_bytes / 1e9:.1f} GB/s, "
        f"{work.decode_bytes / 1e6:.1f} MB a token: "
        f"{limits.read_bytes / work.decode_bytes:.0f} t/s"
        + (f" (weights: {share:.2f} times their bytes in the file)" if share else "")
    )


def _plan_text(chunks: Sequence[PlannedChunk]) -> str:
    parts = []
    for (size, count), run in groupby(chunks, lambda chunk: (chunk.size, chunk.count)):
        times = len(list(run))
        padding = "" if size in (None, count) else f" of {size}"
        where = "host" if size is None else "accelerator"
        parts.append(f"{f'{times} x ' if times > 1 else ''}{count}{padding} on the {where}")
    return ", ".join(parts)


def _line(label: str, prediction: Prediction, count: int) -> str:
    seconds, bubbles = prediction.seconds, prediction.bubbles
    idle = f", accelerator idle {bubbles:.0%}" if bubbles else ""
    return f"  {label + ':':26} {seconds:.3f} s, {count / seconds:.0f} t/s{idle}"
