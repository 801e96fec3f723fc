"""`edgellm bench`"""

from __future__ import annotations

import sys

import click

from edgellm.benchmark import bench as measure
from edgellm.benchmark import to_json, to_markdown
from edgellm.cli.options import LoadArguments, load_options, model_argument
from edgellm.cli.progress import export_progress
from edgellm.errors import OptionError
from edgellm.llm import load


@click.command()
@model_argument
@load_options
@click.option("-p", "--n-prompt", default="512", show_default=True, help="Prompt sizes: 512,2048.")
@click.option("-n", "--n-gen", default="128", show_default=True, help="Generation sizes.")
@click.option("-d", "--n-depth", default="0", show_default=True, help="Tokens in the cache before.")
@click.option("-r", "--repetitions", type=int, default=5, show_default=True)
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md", show_default=True)
def bench(
    *,
    name: str,
    load_arguments: LoadArguments,
    n_prompt: str,
    n_gen: str,
    n_depth: str,
    repetitions: int,
    output: str,
) -> None:
    """Measure prefill (pp) and decode (tg) speed in tokens a second: mean ± standard deviation."""
    prompts, generations, depths = map(_sizes, (n_prompt, n_gen, n_depth))
    needed = max([*prompts, *generations, 0]) + max(depths)
    if load_arguments["ctx_size"] is None and needed > 4096:
        load_arguments["ctx_size"] = needed
    with export_progress() as exporting:
        llm = load(name, **load_arguments, export_progress=exporting)

    def show(test: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{test}: {done}/{total}  ", err=True, nl=done == total)

    results = measure(
        llm.engine,
        prompts=prompts,
        generations=generations,
        depths=depths,
        repetitions=repetitions,
        progress=show,
    )
    click.echo((to_json if output == "json" else to_markdown)(results, llm.engine))


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(
            f"{text!r}: write one size or several with commas, e.g. 512,2048"
        ) from None
