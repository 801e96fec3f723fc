"""`edgellm plan`: chunks, times and limits of a prompt's prefill."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import click

from edgellm import LLM, LoadArguments, load
from edgellm.cli.models import copies_text
from edgellm.cli.options import load_options, model_argument
from edgellm.cli.progress import progress_bar
from edgellm.cli.text import spelled_out
from edgellm.errors import OptionError
from edgellm.measure.explain import (
    Machine,
    PlannedChunk,
    TimedPrompt,
    chunks_of,
    forecasts,
    limits,
    resident,
    time_prompt,
    usual_choice,
)


@click.command()
@click.argument("prompt_length", type=click.IntRange(min=1), default=512)
@model_argument
@load_options
def plan(*, name: str, prompt_length: int, load_arguments: LoadArguments) -> None:
    """Explain how a prompt of PROMPT_LENGTH tokens is prefilled, and what limits it."""
    with progress_bar() as progress:
        llm = load(name, **load_arguments, progress=progress)
    if prompt_length > llm.ctx_size:
        raise OptionError(
            f"a prompt of {prompt_length} tokens does not fit into a context of "
            f"{llm.ctx_size}; raise --ctx-size, up to what the model was trained for"
        )
    click.echo(
        f"{spelled_out(llm.name)}, {prompt_length} tokens: prefill {llm.prefill}; decode "
        f"{llm.decode}; {llm.threads} threads"
    )
    _show_chunks(llm, prompt_length)
    _show_measured(llm, prompt_length)
    _show_limits(llm, prompt_length)
    _show_memory(llm)
    choice = usual_choice(llm.engine)
    click.echo(f"--prefill auto takes {choice.prefill}: {choice.reason}")


def _show_chunks(llm: LLM, count: int) -> None:
    chunks = chunks_of(llm.engine, count)
    if not chunks:
        return
    click.echo(f"chunks: {_plan_text(chunks)}")
    for speed, group in groupby(forecasts(llm.engine, chunks), lambda f: f.accelerator_speed):
        if speed > 1:
            click.echo(f"with an accelerator {speed} times as fast:")
        for forecast in group:
            label = f"predicted, {forecast.schedule}"
            predicted = forecast.prediction
            click.echo(_line(label, predicted.seconds, count, bubbles=predicted.bubbles))


def _show_measured(llm: LLM, count: int) -> None:
    timed = time_prompt(llm.engine, count)
    for prompt in timed:
        label = f"measured, {prompt.schedule or f'--prefill {prompt.prefill}'}"
        click.echo(_line(label, min(prompt.seconds), count, bubbles=prompt.bubbles))
    if len(timed) > 1:
        click.echo(f"faster at this length: {_faster(timed)}")


def _faster(timed: Sequence[TimedPrompt]) -> str:
    first, second = sorted(timed, key=lambda prompt: min(prompt.seconds))
    if max(first.seconds) < min(second.seconds):
        return f"--prefill {first.prefill}"
    return f"{first.prefill} and {second.prefill} differ by no more than their times vary"


def _show_limits(llm: LLM, count: int) -> None:
    limit = limits(llm.engine, count)
    work, share = limit.work, limit.work.weight_share
    click.echo(
        f"limits: prefill {limit.prefill.flops / 1e9:.0f} GFLOP/s ({_kind(limit.prefill)}), "
        f"{work.prefill_flops / 1e9:.3f} GFLOP a token: "
        f"{limit.prefill.flops / work.prefill_flops:.0f} t/s"
    )
    click.echo(
        f"        decode {limit.decode.read_bytes / 1e9:.1f} GB/s, "
        f"{work.decode_bytes / 1e6:.1f} MB a token: "
        f"{limit.decode.read_bytes / work.decode_bytes:.0f} t/s"
        + (f" (weights: {share:.2f} times their bytes in the file)" if share else "")
    )


def _show_memory(llm: LLM) -> None:
    engine = llm.engine
    click.echo(f"weights: about {copies_text(engine.memory.copies)}")
    found = resident(engine.bundle)
    mapped = ", ".join(f"{folder} {size / 1e6:.1f}" for folder, size in found.mapped.items())
    click.echo(
        f"in memory now: {found.total / 1e6:.1f} MB"
        + (f", of which mapped from the bundle's files: {mapped}" if mapped else "")
    )


def _kind(machine: Machine) -> str:
    if machine.peak is None:
        return machine.kind
    return f"{machine.kind}: {machine.flops / machine.peak:.0%} of its 8-bit arithmetic"


def _plan_text(chunks: Sequence[PlannedChunk]) -> str:
    parts = []
    for (size, count), run in groupby(chunks, lambda chunk: (chunk.size, chunk.count)):
        times = len(list(run))
        padding = "" if size in (None, count) else f" of {size}"
        where = "host" if size is None else "accelerator"
        parts.append(f"{f'{times} x ' if times > 1 else ''}{count}{padding} on the {where}")
    return ", ".join(parts)


def _line(label: str, seconds: float, count: int, *, bubbles: float) -> str:
    idle = f", accelerator idle {bubbles:.0%}" if bubbles else ""
    return f"  {label + ':':26} {seconds:.3f} s, {count / seconds:.0f} t/s{idle}"
