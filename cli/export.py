"""`edgellm export`"""

from __future__ import annotations

from pathlib import Path

import click

from edgellm.bundle import Bundle
from edgellm.cli.options import model_argument
from edgellm.cli.progress import export_progress
from edgellm.errors import OptionError
from edgellm.export import DEFAULT_CHUNK_SIZES, DEFAULT_FLAVOURS, check_flavours
from edgellm.export import export as export_bundle
from edgellm.flavours import FLAVOURS
from edgellm.prepare import prepare
from edgellm.sources import resolve


@click.command()
@model_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder of the bundle."
    "  [default: inside EDGELLM_HOME]",
)  # fmt: skip
@click.option(
    "--flavours",
    default=",".join(DEFAULT_FLAVOURS),
    show_default=True,
    help=f"Precisions to export, from {', '.join(FLAVOURS)}.",
)
@click.option(
    "--chunk-sizes",
    default=",".join(map(str, DEFAULT_CHUNK_SIZES)),
    show_default=True,
    help="Static chunk sizes.",
)
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
def export(*, name: str, output: Path | None, flavours: str, chunk_sizes: str, force: bool) -> None:
    """Export MODEL to a bundle: static-shape ONNX graphs, decode weights, tokenizer."""
    wanted = flavours.split(",")
    check_flavours(wanted)
    with export_progress() as progress:
        if output is None:
            bundle = prepare(name, flavours=wanted, force=force, progress=progress)
        else:
            source = resolve(name)
            bundle = export_bundle(
                source.path,
                output,
                name=name,
                source=source.spec,
                flavours=wanted,
                chunk_sizes=_sizes(chunk_sizes),
                force=force,
                progress=progress,
            )
    report(bundle)


def report(bundle: Bundle) -> None:
    """One line for each flavour, and where the bundle is."""
    for name, flavour in bundle.manifest.flavours.items():
        found = flavour.import_report
        line = f"{name}: {found['exact_tensors']} tensors exact"
        if found["requantized_tensors"]:
            line += (
                f", {found['requantized_tensors']} quantized (relative error mean "
                f"{found['mean_relative_error']:.4f}, worst {found['worst_relative_error']:.4f} "
                f"in {found['worst_tensor']})"
            )
        click.echo(line, err=True)
    click.echo(f"{bundle.path} ({bundle.bytes / 1e6:.1f} MB)")


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"chunk sizes {text!r}: write numbers with commas, e.g. 32,128") from None
