"""`edgellm infill`: the missing text between a prefix and a suffix."""

from __future__ import annotations

from pathlib import Path

import click

from edgellm import GenerationArguments, LoadArguments
from edgellm.cli.options import draft_options, load_options, model_argument
from edgellm.cli.output import shown_stats
from edgellm.cli.run import fill
from edgellm.cli.sampling_options import sampling_options
from edgellm.cli.text import read_text
from edgellm.errors import OptionError
from edgellm.infill import ORDERS, Gap, Order

_FILE = click.Path(path_type=Path, allow_dash=True)


@click.command()
@model_argument
@draft_options
@load_options
@sampling_options
@click.option("--prefix", "--in-prefix", "prefix", help="What stands before the gap.")
@click.option("--suffix", "--in-suffix", "suffix", help="What stands behind it.")
@click.option("--prefix-file", type=_FILE, help="Read the prefix there; - is standard input.")
@click.option("--suffix-file", type=_FILE, help="Read the suffix there.")
@click.option("--extra", type=_FILE, multiple=True, help="Another file; may be repeated.")
@click.option("--path", default="main", help="Name of the file with the gap, beside others.")
@click.option("--repo-name", "repository", help="Name of the repository.")
@click.option(
    "--fim-order", "order", type=click.Choice(ORDERS),
    help="Order of the parts.  [default: the model's]",
)  # fmt: skip
@click.option("--spm", "--spm-infill", "spm", is_flag=True, help="The same as --fim-order spm.")
@click.option("--single-line", is_flag=True, help="Stop at the end of the line.")
@click.option(
    "--min-indent", type=int, help="Stop before a line that is indented less, in characters."
)
@click.option("--time-limit-ms", type=int, help="Stop after this time, whatever is there by then.")
@click.option("--template", is_flag=True, help="Ask in words; for models without infill tokens.")
@click.option(
    "--stats/--no-stats", default=None,
    help="All timings, or none.  [default: a short line on a terminal]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print answer and timings as a JSON object.")
def infill(
    *,
    name: str,
    load_arguments: LoadArguments,
    sampling: GenerationArguments,
    prefix: str | None,
    suffix: str | None,
    prefix_file: Path | None,
    suffix_file: Path | None,
    extra: tuple[Path, ...],
    path: str,
    repository: str | None,
    order: Order | None,
    spm: bool,
    single_line: bool,
    template: bool,
    stats: bool | None,
    as_json: bool,
) -> int:
    """Fill the gap between --prefix and --suffix; exactly the missing text goes to stdout."""
    gap = Gap(
        prefix=_text("prefix", prefix, prefix_file),
        suffix=_text("suffix", suffix, suffix_file),
        extra=[(str(file), read_text(file)) for file in extra],
        path=path,
        repository=repository,
    )
    if spm and order == "psm":
        raise OptionError("--spm and --fim-order psm are different orders")
    return fill(
        name,
        gap,
        load_arguments,
        sampling,
        order="spm" if spm else order,
        single_line=single_line,
        template=template,
        stats=shown_stats(stats),
        as_json=as_json,
    )


def _text(what: str, text: str | None, file: Path | None) -> str:
    if text is not None and file is not None:
        raise OptionError(f"the {what} is given twice, with --{what} and --{what}-file")
    return read_text(file) if file is not None else text or ""
