"""The folder that an export writes to: checks of a bundle at that path, and its publication."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgellm.errors import BundleError, EdgeLLMError, ExportError, OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.store import bundle as bundles
from edgellm.store.bundle import is_newer, is_outdated
from edgellm.store.manifest import Manifest

_log = logging.getLogger(__name__)


def present_at(out: Path, source: str, *, force: bool, mend: bool) -> Manifest | None:
    """Read the manifest of the bundle at `out`; None if there is none or it is to be replaced.

    Args:
        source: resolved model name, for a warning.
        force, mend: see `export`.

    Raises:
        BundleError: `out` is no bundle, or one that is damaged or of a later format.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (mend or bundles.is_bundle(out)):
        raise BundleError(f"{out}: exists and is not a bundle; choose another folder")
    if force or (mend and is_outdated(out)):
        return None
    try:
        return bundles.open_bundle(out).manifest
    except BundleError as error:
        if not mend or is_newer(out):
            raise
        _log.warning("exporting %s again: %s", source, error)
        return None


def check_same_model(out: Path, present: Manifest, config: ModelConfig) -> None:
    """Refuse to add precisions of one model to the bundle of another."""
    if present.config != config:
        raise BundleError(f"{out}: the bundle is of another model; `force` replaces it")


def check_same_sizes(out: Path, present: Manifest, chunk_sizes: Sequence[int]) -> None:
    """Refuse other chunk sizes than those of the bundle at `out`."""
    sizes = sizes_of(present)
    if sizes and set(sizes) != set(chunk_sizes):
        raise OptionError(
            f"`chunk_sizes` {', '.join(map(str, chunk_sizes))}: the bundle at {out} has "
            f"{', '.join(map(str, sizes))}; `force` replaces it"
        )


def check_same_weights(out: Path, present: Manifest, weights: str) -> None:
    """Refuse another rounding of float weights than that of the bundle at `out`."""
    if present.weights != weights:
        raise OptionError(
            f"`weights` {weights}: the bundle at {out} has {present.weights}; `force` replaces it"
        )


def sizes_of(present: Manifest | None) -> Sequence[int]:
    """Return the chunk sizes of a bundle's precisions with chunks; empty if there are none."""
    entries = present.precisions.values() if present is not None else ()
    return next((entry.chunk_sizes for entry in entries if entry.any_size), ())


def publish(out: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest in `folder`, after a check that all its files are there.

    Raises:
        ExportError: a file is missing.
    """
    try:
        bundles.write_manifest(folder, bundles.with_files(manifest, folder))
    except BundleError as error:
        raise ExportError(f"{out}: someone deleted files while it was written ({error})") from None


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn disk errors in the block into `ExportError`."""
    try:
        yield
    except EdgeLLMError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ExportError(
                f"{out}: the disk is full ({error.strerror}); free some space and try again"
            ) from None
        where = f" ({error.filename})" if error.filename else ""
        raise ExportError(f"{out}: {error.strerror or error}{where}") from None
