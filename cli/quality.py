"""`edgellm quality`: the cost of rounding, measured against float32."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgellm import LoadArguments, load
from edgellm.cli.options import STDIN, load_options, model_argument
from edgellm.cli.progress import progress_bar
from edgellm.cli.text import read_text
from edgellm.errors import OptionError
from edgellm.measure.perplexity import PATHS
from edgellm.measure.quality import QualityResult
from edgellm.measure.quality import quality as measure
from edgellm.models import DEFAULT_MODEL


@click.command()
@model_argument
@click.argument("text", required=False, type=click.Path(path_type=Path, allow_dash=True))
@load_options
@click.option(
    "-f", "--file", type=click.Path(path_type=Path, allow_dash=True), help="The same as TEXT."
)
@click.option(
    "--window",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="Tokens of a window.",
)
@click.option(
    "--max-windows",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Stop after this many windows.",
)
@click.option("--through", type=click.Choice(PATHS), default="prefill", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
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
    with progress_bar() as progress:
        llm = load(name, **load_arguments, progress=progress)
        result = measure(
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
