"""`edgellm cache`: named texts whose KV cache is kept between runs."""

from __future__ import annotations

from pathlib import Path

import click

from edgellm import LoadArguments, load
from edgellm.cli.options import chosen_adapter, load_options, lora_options, model_argument
from edgellm.cli.progress import progress_bar
from edgellm.cli.text import read_text, spelled_out
from edgellm.errors import OptionError
from edgellm.named_prefix import forget_prefix, kept_prefixes


@click.group()
def cache() -> None:
    """Keep system prompts and documents, computed, for `edgellm run --cache NAME`."""


@cache.command()
@click.argument("prefix")
@model_argument
@lora_options
@load_options
@click.option("--adapter", metavar="NAME", help="The adapter of --lora.  [default: the only one]")
@click.option("-p", "--prompt", "text", metavar="TEXT", help="The text itself.")
@click.option(
    "-f", "--file", type=click.Path(path_type=Path, allow_dash=True), help="Read the text there."
)
@click.option("--raw", is_flag=True, help="A text to continue, and no system prompt of a chat.")
def add(
    *,
    prefix: str,
    name: str,
    load_arguments: LoadArguments,
    adapter: str | None,
    text: str | None,
    file: Path | None,
    raw: bool,
) -> None:
    """Compute a text with MODEL and keep it as PREFIX."""
    if (text is None) == (file is None):
        raise OptionError("give the text with -p or with -f, and not with both")
    text = read_text(file) if file is not None else text or ""
    adapter = chosen_adapter(adapter)
    with progress_bar() as progress:
        llm = load(name, **load_arguments, progress=progress)
    with progress_bar() as progress:
        adapter = adapter or llm.generation_options().adapter
        session = llm.prefix(prefix, text, system=not raw, adapter=adapter, progress=progress)
    click.echo(f"{prefix}: {len(session.tokens)} tokens", err=True)


@cache.command()
def ls() -> None:
    """List what is kept."""
    kept = kept_prefixes()
    if not kept:
        click.echo("nothing is kept yet; `edgellm cache add NAME -f FILE` keeps a text", err=True)
    for prefix, folder in kept:
        size = sum(file.stat().st_size for file in folder.iterdir())
        line = (
            f"{prefix.name:20}  {prefix.model:32}  {prefix.kind:6}  "
            f"{prefix.tokens:6} tokens  {prefix.kv_format:4}  {size / 1e6:8.1f} MB"
        )
        click.echo(spelled_out(line))


@cache.command()
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
def rm(*, prefixes: tuple[str, ...]) -> None:
    """Delete what is kept under a name, for all models."""
    for prefix in prefixes:
        if not forget_prefix(prefix):
            raise OptionError(f"no prefix {prefix!r} is kept; see `edgellm cache ls`")
        click.echo(f"deleted {prefix}", err=True)
