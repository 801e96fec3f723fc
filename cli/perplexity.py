"""`edgellm perplexity`: the perplexity of a text."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgellm import LoadArguments, load
from edgellm.cli.options import load_options, model_argument
from edgellm.cli.progress import progress_bar
from edgellm.cli.text import read_text
from edgellm.measure.perplexity import PATHS
from edgellm.measure.perplexity import perplexity as measure


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@model_argument
@load_options
@click.option(
    "--window",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="Tokens of a window.",
)
@click.option("--max-windows", type=click.IntRange(min=1), help="Stop after this many windows.")
@click.option("--through", type=click.Choice(PATHS), default="prefill", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
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
    with progress_bar() as progress:
        llm = load(name, **load_arguments, progress=progress)
    with progress_bar() as progress:
        result = measure(
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
