"""`edgellm pull`, `ls`, `show` and `rm`: the models in EDGELLM_HOME."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from edgellm.backends.selection import select
from edgellm.cli.export import report
from edgellm.cli.options import model_argument
from edgellm.cli.progress import progress_bar
from edgellm.engine.engine import planned_memory
from edgellm.errors import BundleError, EdgeLLMError, SourceError
from edgellm.graphs.tensors import parameters
from edgellm.options import EngineOptions
from edgellm.store.bundle import Bundle, open_bundle, read_manifest
from edgellm.store.bundle_state import check_sizes
from edgellm.store.home import (
    bundles_dir,
    delete_abandoned,
    delete_abandoned_at_home,
    delete_folder,
    locked,
)
from edgellm.store.import_summary import imported
from edgellm.store.precision_removal import remove_precisions
from edgellm.store.prepare import prepare
from edgellm.store.sources import bundle_label, local_path, resolve_here


@click.command()
@model_argument
def pull(*, name: str) -> None:
    """Download MODEL and export it, so that the next run starts at once."""
    with progress_bar() as progress:
        bundle = prepare(name, precisions=select(EngineOptions()).precisions, progress=progress)
    report(bundle)


@click.command()
def ls() -> None:
    """List exported models."""
    folders = _bundle_folders()
    if not folders:
        click.echo("no models yet; `edgellm pull` downloads and exports one", err=True)
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            check_sizes(folder, manifest)
        except EdgeLLMError as error:
            click.echo(f"{folder.name}  damaged: {error}", err=True)
            continue
        size = sum(entry.bytes for entry in manifest.files.values())
        click.echo(
            f"{manifest.name:32}  {size / 1e6:8.1f} MB  {', '.join(manifest.precisions):16}  "
            f"{folder.name}"
        )


@click.command()
@model_argument
@click.option("--verify", is_flag=True, help="Read and check every file of the bundle.")
def show(*, name: str, verify: bool) -> None:
    """Show what MODEL is, its precisions and the memory that it needs."""
    with progress_bar() as progress:
        bundle = prepare(name, precisions=select(EngineOptions()).precisions, progress=progress)
    if verify:
        bundle = open_bundle(bundle.path, verify=True)
    for label, value in _description(bundle):
        click.echo(f"{label:14} {value}")


@click.command()
@click.argument("names", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--precision", "precisions", multiple=True, help="Delete only this precision; may be repeated."
)
def rm(*, names: tuple[str, ...], precisions: tuple[str, ...]) -> None:
    """Delete exported models, by name or by folder as `ls` prints them, and their downloads."""
    for name in names:
        folders = [folder for folder in _bundle_folders() if _is_named(folder, name)]
        if precisions:
            freed = sum(remove_precisions(folder, precisions) for folder in folders)
            deleted = (
                [f"{', '.join(precisions)} of {name}, {freed / 1e6:.1f} MB"] if folders else []
            )
        else:
            deleted = [str(path) for path in _delete(name, folders)]
        if not deleted:
            raise SourceError(f"{name}: no exported model of that name; see `edgellm ls`")
        for what in deleted:
            click.echo(f"deleted {what}", err=True)
    delete_abandoned_at_home()


def _delete(name: str, folders: Sequence[Path]) -> list[Path]:
    """Delete bundles, the model's download, and what killed processes have left of both."""
    for folder in folders:
        with locked(folder):
            delete_folder(folder)
    source = resolve_here(name)
    if source is None:
        return list(folders)
    with locked(bundles_dir() / source.key):
        delete_abandoned(bundles_dir(), of=source.key, abandoned_s=0)
    return [*folders, *(source.member.delete() if source.member is not None else [])]


def _bundle_folders() -> list[Path]:
    """All that ought to be bundles."""
    root = bundles_dir()
    if not root.exists():
        return []
    return sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))


def _is_named(folder: Path, name: str) -> bool:
    here = local_path(name)
    if folder.name == name or folder.resolve() == here:
        return True
    try:
        manifest = read_manifest(folder)
    except BundleError:
        # nothing says any more which model it was, only its folder name how it was called
        return folder.name.rpartition("-")[0] == bundle_label(name)
    return name in (manifest.name, manifest.source) or manifest.source == str(here)


def _description(bundle: Bundle) -> list[tuple[str, str]]:
    manifest, config = bundle.manifest, bundle.config
    lines = [
        ("name", manifest.name),
        ("source", manifest.source),
        ("bundle", f"{bundle.path} ({bundle.bytes / 1e6:.1f} MB)"),
        ("architecture", config.model_type),
        ("parameters", f"{parameters(config) / 1e6:.1f} M"),
        ("context", f"{config.context_length} tokens"),
        (
            "shape",
            f"{config.layer_count} layers, hidden {config.hidden_size}, heads {config.heads}, "
            f"kv_heads {config.kv_heads}, head_dim {config.head_dim}, vocab {config.vocab_size}",
        ),
        ("end tokens", " ".join(manifest.tokenizer.eos) or "none"),
    ]
    options = EngineOptions()
    selection = select(options)
    for name, precision in manifest.precisions.items():
        uses = [
            use
            for use, chosen in (
                ("default prefill", selection.prefill_precision(config)),
                ("default decode", selection.decode_precision),
            )
            if chosen == name
        ]
        sizes = ", ".join(map(str, precision.chunk_sizes))
        chunks = f"; chunks of {sizes}" if sizes else ""
        mark = f" ({', '.join(uses)})" if uses else ""
        files = manifest.files.items()
        size = sum(entry.bytes for file, entry in files if file.startswith(f"{name}/"))
        lines += [
            ("precision", f"{name}{mark}: {size / 1e6:.1f} MB, {precision.description}{chunks}"),
            ("  weights", imported(bundle, name).details()),
        ]
    needed = planned_memory(bundle, options, selection.precisions(config))
    lines.append(
        (
            "memory",
            f"about {needed.total / 1e6:.0f} MB (weights {needed.weights / 1e6:.0f}, KV cache "
            f"{needed.kv_cache / 1e6:.0f} when full)",
        )
    )
    lines.append(("made with", ", ".join(f"{k} {v}" for k, v in manifest.versions.items())))
    return lines
