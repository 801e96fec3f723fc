"""Quick checks of a bundle folder (format version, source, file sizes); no weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgellm.store.bundle import stamp_of
from edgellm.store.manifest import FORMAT, FORMAT_VERSION, MANIFEST, Manifest


def is_outdated(path: Path) -> bool:
    """Whether `path` holds a bundle in an earlier format than this edgellm reads."""
    version = _format_version(path)
    return version is not None and version < FORMAT_VERSION


def is_newer(path: Path) -> bool:
    """Whether `path` holds a bundle in a later format, which this edgellm must leave alone."""
    version = _format_version(path)
    return version is not None and version > FORMAT_VERSION


def recorded_source(path: Path) -> str | None:
    """Return the model source named in the manifest of the bundle at `path`; None without one."""
    source = _values(path).get("source")
    return source if isinstance(source, str) else None


def _format_version(path: Path) -> int | None:
    values = _values(path)
    version = values.get("format_version") if values.get("format") == FORMAT else None
    return version if isinstance(version, int) else None


def _values(path: Path) -> dict[str, Any]:
    """Return the manifest's JSON object unchecked; empty if it cannot be read or is no object."""
    try:
        values = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Compare the sizes of the bundle's files with the manifest, without reading the files.

    Raises:
        BundleError: a file is missing or has another size.
    """
    for name, entry in manifest.files.items():
        stamp_of(path / name, entry, origin=path)
