"""Removal of precisions from a bundle: their folders, and files that no other precision uses."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from edgellm.errors import BundleError
from edgellm.store.bundle import read_manifest, write_manifest
from edgellm.store.home import delete_abandoned, delete_folder, locked
from edgellm.store.manifest import Manifest
from edgellm.store.reference import FOLDER as REFERENCE


def remove_precisions(path: Path, precisions: Collection[str]) -> int:
    """Remove precisions from the bundle at `path`, and return the number of bytes freed.

    At every moment all files that the manifest lists exist for other readers.

    Raises:
        BundleError: the bundle lacks such a precision, or has no other.
    """
    with locked(path):
        delete_abandoned(path)  # leftovers of a process that was killed here
        manifest = read_manifest(path)
        unknown = sorted(set(precisions) - set(manifest.precisions))
        there_are = ", ".join(manifest.precisions)
        if unknown:
            raise BundleError(
                f"{path}: no precision {', '.join(unknown)} in this bundle; it has {there_are}"
            )
        smaller = _without(manifest, precisions)
        if not smaller.precisions:
            raise BundleError(
                f"{path}: {there_are} is all that this bundle has; remove the model as a whole"
            )
        write_manifest(path, smaller)
        gone = {name: manifest.files[name] for name in manifest.files.keys() - smaller.files.keys()}
        for folder in {name.partition("/")[0] for name in gone}:
            with contextlib.suppress(FileNotFoundError):
                delete_folder(path / folder)
        return sum(entry.bytes for entry in gone.values())


def _without(manifest: Manifest, precisions: Collection[str]) -> Manifest:
    left = {name: entry for name, entry in manifest.precisions.items() if name not in precisions}
    heads = {
        kind: head
        for kind, head in manifest.heads.items()
        if any(entry.head == kind for entry in left.values())
    }
    # only precisions with errors were compared with the reference
    reference = manifest.reference if any(entry.errors for entry in left.values()) else {}
    gone = {f"head-{kind}" for kind in manifest.heads.keys() - heads.keys()} | set(precisions)
    if manifest.reference and not reference:
        gone.add(REFERENCE)
    files = {n: entry for n, entry in manifest.files.items() if n.partition("/")[0] not in gone}
    return replace(manifest, precisions=left, heads=heads, reference=reference, files=files)
