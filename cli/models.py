"""`edgellm pull`, `ls`, `show`, `rm`, `export` and `cache`: models and texts on the disk."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from edgellm import LoadArguments
from edgellm.cli.config import path_and_scale
from edgellm.cli.options import (
    Command,
    all_of,
    chosen_adapter,
    load_options,
    lora_options,
    model_argument,
    option_of,
)
from edgellm.cli.progress import loaded, progress_bar
from edgellm.cli.text import read_text, spelled_out
from edgellm.errors import OptionError
from edgellm.export import (
    DEFAULT_CHUNK_SIZES,
    DEFAULT_PRECISIONS,
    FLOAT_WEIGHTS,
    PRECISIONS,
    CalibrationOptions,
    check_chunk_sizes,
    check_precisions,
    default_precisions,
)
from edgellm.models import (
    HOST,
    KNOWN,
    Bundle,
    Copy,
    ModelDescription,
    PrecisionDescription,
    delete_model,
    describe,
    imported,
    list_models,
    prepare,
)
from edgellm.models import pull as pull_model
from edgellm.named_prefix import forget_prefix, kept_prefixes


@click.command()
@model_argument
def pull(*, name: str) -> None:
    """Download MODEL and export it, so that the next run starts at once."""
    with progress_bar() as progress:
        bundle = pull_model(name, progress=progress)
    report(bundle)


@click.command()
@click.option("--available", is_flag=True, help="List models that have a short name instead.")
def ls(*, available: bool) -> None:
    """List exported models."""
    if available:
        _list_known()
        return
    models = list_models()
    if not models:
        click.echo("no models yet; `edgellm pull` downloads and exports one", err=True)
    rows = [
        (model.name, f"{model.bytes / 1e6:.1f} MB", ", ".join(model.precisions), model.folder.name)
        for model in models
        if not model.damage
    ]
    if rows:
        _print_table(("NAME", "SIZE", "PRECISIONS", "FOLDER"), rows)
    for model in models:
        if model.damage:
            click.echo(spelled_out(f"{model.folder.name}  not usable: {model.damage}"), err=True)


def _list_known() -> None:
    rows = [
        (alias, f"{known.megabytes} MB", _measured(known.memory), known.use)
        for alias, known in KNOWN.items()
    ]
    _print_table(("NAME", "FILE", "MEMORY", "FOR"), rows)


def _measured(megabytes: int | None) -> str:
    return "not measured" if megabytes is None else f"{megabytes} MB"


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows under a head; columns of sizes are aligned on the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if title in ("SIZE", "FILE", "MEMORY") else cell.ljust(width)
            for title, cell, width in zip(head, row, widths, strict=True)
        ]
        click.echo(spelled_out("  ".join(cells).rstrip()))


@click.command()
@model_argument
@click.option("--verify", is_flag=True, help="Read and check every file of the bundle.")
def show(*, name: str, verify: bool) -> None:
    """Show what MODEL is, its precisions and the memory that it needs."""
    with progress_bar() as progress:
        description = describe(name, verify=verify, progress=progress)
    for label, value in _lines(description):
        click.echo(spelled_out(f"{label:14} {value}"))


@click.command()
@click.argument("names", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--precision", "precisions", multiple=True, help="Delete only this precision; may be repeated."
)
def rm(*, names: tuple[str, ...], precisions: tuple[str, ...]) -> None:
    """Delete exported models, by name or by folder as `ls` prints them, and their downloads."""
    for name in names:
        for what in delete_model(name, precisions=precisions):
            click.echo(f"deleted {what}", err=True)


def _lines(model: ModelDescription) -> Iterator[tuple[str, str]]:
    bundle, needed = model.bundle, model.memory
    manifest, config = bundle.manifest, bundle.config
    yield "name", manifest.name
    file_type = f" ({manifest.file_type})" if manifest.file_type else ""
    yield "source", manifest.source + file_type
    yield "bundle", f"{bundle.path} ({bundle.bytes / 1e6:.1f} MB)"
    yield "architecture", config.model_type
    used = f", of which a token uses {model.used_parameters / 1e6:.1f} M"
    yield "parameters", f"{model.parameters / 1e6:.1f} M{used if config.has_experts else ''}"
    yield "context", f"{config.context_length} tokens"
    attentions = config.attentions.values()
    yield (
        "shape",
        f"{config.layer_count} layers, hidden {config.hidden_size}, "
        f"heads {_sizes(a.heads for a in attentions)}, "
        f"kv_heads {_sizes(a.kv_heads for a in attentions)}, "
        f"head_dim {_sizes(a.head_dim for a in attentions)}, vocab {config.vocab_size}",
    )
    yield "end tokens", " ".join(manifest.tokenizer.eos) or "none"
    for precision in model.precisions:
        yield "precision", _precision_line(precision)
        yield "  weights", precision.weights
    if model.mtp_bytes is not None:
        size = f"MTP head: {model.mtp_bytes / 1e6:.1f} MB"
        yield "drafts", size if model.mtp_bytes else "no MTP head; `--draft` takes another model"
    yield (
        "memory",
        f"about {needed.total / 1e6:.0f} MB (weights {needed.weights / 1e6:.0f}, KV cache "
        f"{needed.kv_cache / 1e6:.0f} when full)",
    )
    for way, copies in model.copies.items():
        yield "weights held", f"prefill {way}: {copies_text(copies)}"
    yield "made with", ", ".join(f"{k} {v}" for k, v in manifest.versions.items())


def copies_text(copies: Sequence[Copy]) -> str:
    """Return the megabytes of copies of weights on the host and on a device, by their owners."""
    parts = []
    for host in (True, False):
        here = [copy for copy in copies if (copy.place == HOST) == host]
        if here:
            owners = ", ".join(f"{copy.owner} {copy.bytes / 1e6:.1f}" for copy in here)
            total = sum(copy.bytes for copy in here) / 1e6
            parts.append(f"{total:.1f} MB{'' if host else ' on the device'} ({owners})")
    return "; ".join(parts)


def _sizes(values: Iterable[int]) -> str:
    """Return the sizes that layers have, as they are alike or not."""
    return " or ".join(map(str, sorted(set(values))))


def _precision_line(precision: PrecisionDescription) -> str:
    uses = ", ".join(f"default {use}" for use in precision.uses)
    mark = f" ({uses})" if uses else ""
    sizes = ", ".join(map(str, precision.chunk_sizes))
    chunks = f"; chunks of {sizes}" if sizes else ""
    size = precision.bytes / 1e6
    return f"{precision.name}{mark}: {size:.1f} MB, {precision.description}{chunks}"


_CALIBRATION = {
    "text": "File to calibrate static precisions on.  [default: Python's manual and library]",
    "windows": None,
    "window": "Tokens of each.",
    "seed": None,
    "method": "How far 8-bit activations reach.",
    "percentile": None,
    "shadow_share": "Of the down_proj layers, those for which the host computes what 8 bits clip.",
    "shadow_percentile": "How far 8 bits reach in those.",
    "rounding": "Of weights: for the inputs that were seen, or to the nearest, which is faster.",
}


def calibration_options(command: Command) -> Command:
    """Add options for the calibration of static scales; passed on as `calibration`."""
    kinds = {"text": click.Path(path_type=Path)}

    @all_of(
        option_of(CalibrationOptions, name, help, kind=kinds.get(name), prefix="calibration_")
        for name, help in _CALIBRATION.items()
    )
    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        values = {name: given.pop(f"calibration_{name}") for name in _CALIBRATION}
        if values["text"] is not None:
            values["text"] = read_text(values["text"])
        command(calibration=CalibrationOptions(**values), **given)

    return wrapped


@click.command()
@model_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder of the bundle."
    "  [default: inside EDGELLM_HOME]",
)  # fmt: skip
@click.option(
    "--precisions",
    help=f"Precisions to export, from {', '.join(PRECISIONS)}.  [default: "
    f"{','.join(DEFAULT_PRECISIONS)}, or f32 for w8a8 where a model cannot be rotated]",
)
@click.option(
    "--weights",
    type=click.Choice(FLOAT_WEIGHTS),
    help="What linear layers of F32, F16 and BF16 files become; auto is int8.  [default: auto]",
)
@click.option(
    "--chunk-sizes",
    help=f"Static chunk sizes.  [default: {','.join(map(str, DEFAULT_CHUNK_SIZES))}]",
)
@calibration_options
@click.option(
    "--lora", multiple=True, metavar="PATH[:SCALE]",
    help="An adapter (LoRA) to merge into the weights before they are rounded, for back ends that "
    "take no adapters; may be repeated.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
def export(
    *,
    name: str,
    output: Path | None,
    precisions: str | None,
    weights: str | None,
    chunk_sizes: str | None,
    calibration: CalibrationOptions,
    lora: tuple[str, ...],
    force: bool,
) -> None:
    """Export MODEL to a bundle: static-shape ONNX graphs, decode weights, tokenizer."""
    sizes = None if chunk_sizes is None else _chunk_sizes(chunk_sizes)
    names = [*DEFAULT_PRECISIONS] if precisions is None else precisions.split(",")
    check_precisions(names)
    if sizes is not None:
        check_chunk_sizes(sizes, names)
    with progress_bar() as progress:
        bundle = prepare(
            name,
            precisions=default_precisions if precisions is None else names,
            out=output,
            chunk_sizes=sizes,
            weights=weights,
            calibration=calibration,
            lora=[(Path(path), scale) for path, scale in map(path_and_scale, lora)],
            force=force,
            progress=progress,
        )
    report(bundle)


def report(bundle: Bundle) -> None:
    """Print one line for each precision of a bundle, and the bundle's folder and size."""
    for name in bundle.manifest.precisions:
        click.echo(spelled_out(f"{name}: {imported(bundle.manifest, name).details()}"), err=True)
    click.echo(f"{bundle.path} ({bundle.bytes / 1e6:.1f} MB)")


def _chunk_sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"chunk sizes {text!r}: write numbers with commas, e.g. 32,128") from None


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
@click.option(
    "--keep",
    type=float,
    default=1.0,
    show_default=True,
    help="Share of its K and V that is kept, those that it takes to repeat the text: 0.5 takes "
    "half of the KV cache, and answers stay near.",
)
def add(
    *,
    prefix: str,
    name: str,
    load_arguments: LoadArguments,
    adapter: str | None,
    text: str | None,
    file: Path | None,
    raw: bool,
    keep: float,
) -> None:
    """Compute a text with MODEL and keep it as PREFIX."""
    if (text is None) == (file is None):
        raise OptionError("give the text with -p or with -f, and not with both")
    text = read_text(file) if file is not None else text or ""
    adapter = chosen_adapter(adapter)
    llm = loaded(name, load_arguments)
    with progress_bar() as progress:
        adapter = adapter or llm.generation_options().adapter
        session = llm.prefix(
            prefix, text, system=not raw, keep=keep, adapter=adapter, progress=progress
        )
    click.echo(f"{prefix}: {len(session.tokens)} tokens", err=True)


@cache.command("ls")
def list_prefixes() -> None:
    """List what is kept."""
    kept = kept_prefixes()
    if not kept:
        click.echo("nothing is kept yet; `edgellm cache add NAME -f FILE` keeps a text", err=True)
    for prefix, folder in kept:
        size = sum(file.stat().st_size for file in folder.iterdir())
        part = "" if prefix.keep == 1 else f"  {prefix.keep:.0%} of K and V"
        line = (
            f"{prefix.name:20}  {prefix.model:32}  {prefix.kind:6}  "
            f"{prefix.tokens:6} tokens  {prefix.kv_format:4}  {size / 1e6:8.1f} MB{part}"
        )
        click.echo(spelled_out(line))


@cache.command("rm")
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
def delete_prefixes(*, prefixes: tuple[str, ...]) -> None:
    """Delete what is kept under a name, for all models."""
    for prefix in prefixes:
        if not forget_prefix(prefix):
            raise OptionError(f"no prefix {prefix!r} is kept; see `edgellm cache ls`")
        click.echo(f"deleted {prefix}", err=True)
