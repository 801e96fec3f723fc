"""The bundle, an exported model: one folder that holds everything the runtime reads.

    manifest.json            the content of the bundle, with the size and sha256 of every file
    tokenizer.json           for the `tokenizers` library
    chat_template.jinja      if the model has one
    <precision>/               NNN.onnx (any chunk size), NNN.cC.onnx (static), weights.bin
    head-<kind>/             head.onnx, weights.bin with the embedding
    packed/                  weights.bin for the native kernels, embedding and head among them
    reference/               weights.bin: a text in float32, to compare graphs with
    keys/                    weights.bin: the basis of keys, and norms of Q and K (see
                             key_basis.py)

Graphs of a folder share its weights.bin, which ONNX Runtime and numpy map into memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.errors import BundleError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.rope_scaling import stretch
from edgellm.store.bundle_check import check_manifest
from edgellm.store.home import replacing_file, sha256_of
from edgellm.store.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    FileEntry,
    Manifest,
    PrecisionEntry,
)

# File that remembers the size and time of change of each file when its sha256 was last right, so
# that a start reads no weights it does not use; not part of the bundle.
_CHECKED = ".checked.json"
# File with the cost of chunks on this machine (see costs.py); not part of the bundle either.
COSTS = ".costs.json"
# File with what layers lose with fewer bits of K and V (see kv_bits.py); nor is this one.
KV_LOSSES = ".kv_losses.json"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle, whose files are complete and unchanged."""

    path: Path
    manifest: Manifest

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    @property
    def bytes(self) -> int:
        """Size of the bundle on disk in bytes, without the manifest."""
        return sum(entry.bytes for entry in self.manifest.files.values())

    def precision(self, name: str) -> PrecisionEntry:
        if name not in self.manifest.precisions:
            raise BundleError(
                f"{self.path}: precision {name} is not in this bundle; it has "
                + ", ".join(self.manifest.precisions)
            )
        return self.manifest.precisions[name]


def stretched(bundle: Bundle, rope_scale: float | None) -> Bundle:
    """Return a bundle whose RoPE is stretched by a factor (see `stretch`); None: as it is."""
    if rope_scale is None:
        return bundle
    config = stretch(bundle.config, rope_scale)
    return replace(bundle, manifest=replace(bundle.manifest, config=config))


def is_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_bundle(path: Path, *, verify: bool = False) -> Bundle:
    """Open a bundle after checking its manifest against its config, and its files against that.

    Args:
        verify: read and hash every file, even those that have not changed since the last check.

    Raises:
        BundleError: `path` is no bundle or has another format, its arrays do not fit the config, or
            a file is missing, cut off or changed.
    """
    manifest = read_manifest(path)
    checked = {} if verify else _read_checked(path)
    stamps = {}
    for name, entry in manifest.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise BundleError(f"{path}: the manifest names a file outside the bundle: {name}")
        stamp = stamp_of(path / name, entry, origin=path)
        if checked.get(name) != [entry.sha256, *stamp]:
            try:
                digest = sha256_of(path / name)
            except OSError as error:
                raise BundleError(f"{path}: {name}: {error.strerror or error}") from None
            if digest != entry.sha256:
                raise BundleError(
                    f"{path}: {name} is damaged (its sha256 is not the manifest's); "
                    "export the model again"
                )
        stamps[name] = [entry.sha256, *stamp]
    if stamps != checked:
        _write_checked(path, stamps)
    return Bundle(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the bundle at `path`, without looking at its other files.

    Raises:
        BundleError: no manifest, a damaged one, or one that does not fit its own config.
    """
    try:
        values = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{path}: not a bundle: {MANIFEST}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: damaged manifest ({error})") from None
    manifest = Manifest.from_json(values, origin=str(path / MANIFEST))
    check_manifest(manifest, origin=str(path))
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    with replacing_file(path / MANIFEST) as partial:
        partial.write_text(json.dumps(manifest.to_json(), indent=1) + "\n", encoding="utf-8")


def with_files(manifest: Manifest, path: Path) -> Manifest:
    """Return the manifest with the size and sha256 of every file now in the bundle folder `path`.

    Files that the manifest lists already are not read again.

    Raises:
        BundleError: a file that the manifest lists, or one that the model needs, is missing.
    """
    files: dict[str, FileEntry] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_dir() or name == MANIFEST or name.startswith("."):
            continue
        known = manifest.files.get(name)
        if known is None:
            known = FileEntry(file.stat().st_size, sha256_of(file))
        files[name] = known
    lost = sorted(manifest.files.keys() - files.keys())
    if lost:
        raise BundleError(f"{path}: {lost[0]} is missing; export the model again")
    complete = replace(manifest, files=files)
    check_manifest(complete, origin=str(path))
    return complete


def stamp_of(file: Path, entry: FileEntry, *, origin: Path) -> tuple[int, int]:
    """Return size and time of change (ns) of a file of the bundle at `origin`.

    Raises:
        BundleError: the file is missing or its size is not that of `entry`.
    """
    try:
        stat = file.stat()
    except OSError:
        raise BundleError(
            f"{origin}: {file.relative_to(origin)} is missing; export the model again"
        ) from None
    if stat.st_size != entry.bytes:
        raise BundleError(
            f"{origin}: {file.relative_to(origin)} has {stat.st_size} bytes, expected "
            f"{entry.bytes}; export the model again"
        )
    return stat.st_size, stat.st_mtime_ns


def _read_checked(path: Path) -> dict[str, Any]:
    try:
        values = json.loads((path / _CHECKED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write_checked(path: Path, values: Mapping[str, Any]) -> None:
    try:
        with replacing_file(path / _CHECKED, lasting=False) as partial:
            partial.write_text(json.dumps(values), encoding="utf-8")
    except OSError:
        pass  # a read-only bundle is checked in full at each start


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
