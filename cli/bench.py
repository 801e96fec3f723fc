"""`edgellm bench`: speed of prefill and decode."""

from __future__ import annotations

import sys

import click

from edgellm import LoadArguments, Progress, load
from edgellm.cli.options import chosen_adapter, load_options, lora_options, model_argument
from edgellm.cli.progress import progress_bar
from edgellm.measure.benchmark import bench as measure
from edgellm.measure.benchmark import to_json, to_markdown


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
    with progress_bar() as progress:
        llm = load(name, **load_arguments, progress=progress)

    def show(test: Progress) -> None:
        if sys.stderr.isatty():
            end = test.done == test.total
            click.echo(f"\r{test.label}: {test.done}/{test.total}  ", err=True, nl=end)

    results = measure(
        llm.engine,
        prompts=prompts,
        generations=generations,
        depths=depths,
        repetitions=repetitions,
        adapter=adapter,
        progress=show,
    )
    click.echo((to_json if output == "json" else to_markdown)(results, llm.engine))
