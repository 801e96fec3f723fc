"""What is wrong with a folder that should be a bundle, without reading its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgellm.store.bundle import stamp_of
from edgellm.store.manifest import FORMAT, FORMAT_VERSION, MANIFEST, Manifest


def is_outdated(path: Path) -> bool:
    """Whether there is a bundle that an earlier edgellm made in a format of its own."""
    version = _format_version(path)
    return version is not None and version < FORMAT_VERSION


def is_newer(path: Path) -> bool:
    """Whether there is a bundle of a later edgellm, which this one must leave alone."""
    version = _format_version(path)
    return version is not None and version > FORMAT_VERSION


def recorded_source(path: Path) -> str | None:
    """The model that the bundle says it was made of."""
    source = _values(path).get("source")
    return source if isinstance(source, str) else None


def _format_version(path: Path) -> int | None:
    values = _values(path)
    version = values.get("format_version") if values.get("format") == FORMAT else None
    return version if isinstance(version, int) else None


def _values(path: Path) -> dict[str, Any]:
    """The manifest as it stands there, whatever it is; empty if it cannot be read."""
    try:
        values = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def check_sizes(path: Path, manifest: Manifest) -> None:
    """A quick look at the files, without reading them.

    Raises:
        BundleError: one is missing or has another size.
    """
    for name, entry in manifest.files.items():
        stamp_of(path / name, entry, origin=path)
