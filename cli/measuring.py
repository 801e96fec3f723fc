"""`edgellm bench`, `perplexity`, `quality` and `plan`: speed, and the cost of rounding."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from edgellm import LLM, LoadArguments, Progress
from edgellm.cli.models import copies_text
from edgellm.cli.options import (
    STDIN,
    chosen_adapter,
    load_options,
    lora_options,
    model_argument,
)
from edgellm.cli.progress import loaded, progress_bar
from edgellm.cli.text import read_text, spelled_out
from edgellm.errors import OptionError
from edgellm.measure.benchmark import bench as measure_speed
from edgellm.measure.benchmark import to_json, to_markdown
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
from edgellm.measure.perplexity import PATHS
from edgellm.measure.perplexity import perplexity as measure_perplexity
from edgellm.measure.quality import QualityResult
from edgellm.measure.quality import quality as measure_quality
from edgellm.models import DEFAULT_MODEL


@click.command()
@click.argument("prompt_length", type=click.IntRange(min=1), default=512)
@model_argument
@load_options
def plan(*, name: str, prompt_length: int, load_arguments: LoadArguments) -> None:
    """Explain how a prompt of PROMPT_LENGTH tokens is prefilled, and what limits it."""
    llm = loaded(name, load_arguments)
    if prompt_length > llm.ctx_size:
        raise OptionError(
            f"a prompt of {prompt_length} tokens does not fit into a context of "
            f"{llm.ctx_size}; raise --ctx-size as far as the model goes, or --rope-scale beyond"
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
    memory = resident(engine.bundle)
    mapped = ", ".join(f"{folder} {size / 1e6:.1f}" for folder, size in memory.mapped.items())
    click.echo(
        f"in memory now: {memory.total / 1e6:.1f} MB"
        + (f", of which mapped from the bundle's files: {mapped}" if mapped else "")
    )
    options, spilled = engine.options, engine.memory.spilled
    click.echo(
        f"KV cache: {engine.memory.kv_cache / 1e6:.1f} MB when full, {options.kv_text}; contexts "
        f"of {engine.ctx_size} tokens"
        + (f", {options.kv_budget} of them kept" if options.kv_budget else "")
        + (f"; a token of an answer reads {options.kv_read} at most" if options.kv_read else "")
        + (f"; {spilled / 1e6:.1f} MB more in a file of {options.kv_spill}" if spilled else "")
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


def _sizes(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    """Parse numbers of tokens that are separated by commas."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r}: write one size or several with commas, e.g. 512,2048"
        ) from None
    if min(sizes) < 0:
        raise click.BadParameter(f"{min(sizes)} tokens; allowed is 0 or more")
    return sizes


@click.command()
@model_argument
@lora_options
@load_options
@click.option("--adapter", metavar="NAME", help="The adapter of --lora.  [default: the only one]")
@click.option(
    "-p", "--n-prompt", "prompts", callback=_sizes, default="512", show_default=True,
    help="Prompt sizes: 512,2048.",
)  # fmt: skip
@click.option(
    "-n", "--n-gen", "generations", callback=_sizes, default="128", show_default=True,
    help="Generation sizes.",
)  # fmt: skip
@click.option(
    "-d", "--n-depth", "depths", callback=_sizes, default="0", show_default=True,
    help="Tokens in the cache before.",
)  # fmt: skip
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md", show_default=True)
def bench(
    *,
    name: str,
    load_arguments: LoadArguments,
    adapter: str | None,
    prompts: list[int],
    generations: list[int],
    depths: list[int],
    repetitions: int,
    output: str,
) -> None:
    """Measure prefill (pp) and decode (tg) speed in tokens a second: mean ± standard deviation."""
    adapter = chosen_adapter(adapter)
    llm = loaded(name, load_arguments)

    def show(test: Progress) -> None:
        if sys.stderr.isatty():
            end = test.done == test.total
            click.echo(f"\r{test.label}: {test.done}/{test.total}  ", err=True, nl=end)

    results = measure_speed(
        llm.engine,
        prompts=prompts,
        generations=generations,
        depths=depths,
        repetitions=repetitions,
        adapter=adapter,
        progress=show,
    )
    click.echo((to_json if output == "json" else to_markdown)(results, llm.engine))


def _window_options(most: int | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of measurements in windows of a text.

    Args:
        most: windows to measure if none are asked for; None: all.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--json", "as_json", is_flag=True, help="Print a JSON object."),
            click.option(
                "--through", type=click.Choice(PATHS), default="prefill", show_default=True
            ),
            click.option(
                "--max-windows",
                type=click.IntRange(min=1),
                default=most,
                show_default=most is not None,
                help="Stop after this many windows.",
            ),
            click.option(
                "--window",
                type=click.IntRange(min=2),
                default=512,
                show_default=True,
                help="Tokens of a window.",
            ),
        ):
            command = option(command)
        return command

    return add


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@model_argument
@load_options
@_window_options(None)
def perplexity(
    *,
    name: str,
    file: Path,
    load_arguments: LoadArguments,
    window: int,
    max_windows: int | None,
    through: str,
    as_json: bool,
) -> None:
    """Perplexity of the text in FILE (`-` is stdin).

    The text is cut into windows that do not overlap, each on an empty cache; the first token of a
    window is not scored.
    """
    text = read_text(file)
    llm = loaded(name, load_arguments)
    with progress_bar() as progress:
        result = measure_perplexity(
            llm.engine,
            text,
            window=window,
            max_windows=max_windows,
            through=through,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        click.echo(
            f"perplexity {result.perplexity:.4f} over {result.tokens} tokens "
            f"({result.windows} windows of {result.window}, {result.through} {result.precision}, "
            f"KV cache {result.kv_format})"
        )


@click.command()
@model_argument
@click.argument("text", required=False, type=click.Path(path_type=Path, allow_dash=True))
@load_options
@click.option(
    "-f", "--file", type=click.Path(path_type=Path, allow_dash=True), help="The same as TEXT."
)
@_window_options(16)
def quality(
    *,
    name: str,
    text: Path | None,
    file: Path | None,
    load_arguments: LoadArguments,
    window: int,
    max_windows: int,
    through: str,
    as_json: bool,
) -> None:
    """Measure what rounding costs MODEL: its distance from float32 on the file's own weights.

    Perplexity of both, the Kullback-Leibler divergence of float32's next token to that of what
    runs, and how often both find the same one likeliest. It needs the model file that MODEL was
    made of.

    TEXT is a file (`-` is stdin). Without one, chapters of Python's manual and modules of its
    library are read in turn, none of which any model is calibrated on; each version of Python has
    its own, so compare figures of one version only.

    The text is cut into windows that do not overlap, each on an empty cache; every token of a
    window but the first is scored.
    """
    if name == STDIN and text is None:
        name, text = DEFAULT_MODEL, Path(STDIN)
    if text is not None and file is not None:
        raise OptionError("the text is given twice, as TEXT and with --file")
    path = text or file
    content = None if path is None else read_text(path)
    llm = loaded(name, load_arguments)
    with progress_bar() as progress:
        result = measure_quality(
            llm.engine,
            content,
            window=window,
            max_windows=max_windows,
            through=through,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        click.echo("\n".join(_lines(result)))


def _lines(result: QualityResult) -> list[str]:
    return [
        f"perplexity        {result.perplexity:.4f} ({result.perplexity_change:+.2%})",
        f"float32           {result.float_perplexity:.4f}",
        f"KL divergence     {result.kl_mean:.5f} ± {result.kl_mean_error:.5f}, "
        f"99 % of tokens at most {result.kl_99:.4f}",
        f"same top token    {result.same_top:.2%}",
        f"measured on       {result.tokens} tokens ({result.windows} windows of {result.window}), "
        f"{result.through} {result.precision}, KV cache {result.kv_format}",
    ]
