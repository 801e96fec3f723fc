"""From a model name to an opened bundle: resolve the name, export once, open."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.errors import BundleError, EdgeLLMError, ModelFormatError, OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle, is_bundle, is_newer, open_bundle, recorded_source
from edgellm.store.home import bundles_dir, delete_abandoned_at_home
from edgellm.store.precision_support import Precisions, names_of
from edgellm.store.sources import Source, resolve, resolve_here

if TYPE_CHECKING:
    from edgellm.export.calibrate import CalibrationOptions

_log = logging.getLogger(__name__)


def prepare(
    name: str,
    *,
    precisions: Precisions,
    out: Path | None = None,
    chunk_sizes: Sequence[int] | None = None,
    weights: str | None = None,
    calibration: CalibrationOptions | None = None,
    lora: Sequence[tuple[Path, float]] = (),
    progress: ProgressCallback | None = None,
    force: bool = False,
) -> Bundle:
    """Open the bundle of a model, after exporting it on first use.

    A bundle in EDGELLM_HOME is exported again after a change of format, and when it is damaged,
    with a logged warning. A damaged bundle elsewhere is never overwritten.

    Args:
        name: model name, see `sources.py`; the folder of a bundle is opened as it is.
        precisions: names, or a function of the config; those missing in the bundle are exported.
        out: the folder of the bundle; None is one in EDGELLM_HOME.
        chunk_sizes, weights, calibration, progress: see `export`; download progress is in bytes.
        lora: see `export`; not without `out`, as the model's own bundle is not of them.
        force: export again.

    Raises:
        SourceError, ModelFormatError, UnsupportedModelError, BundleError, ExportError, OptionError
    """
    wanted = precisions if callable(precisions) else tuple(precisions)
    if lora and out is None:
        raise OptionError(
            "`lora` merges adapters into the weights of a bundle, which needs a folder of its own: "
            "name one as `out` (-o)"
        )
    delete_abandoned_at_home()
    # a function of the config refuses what cannot run the model
    source = resolve(name, check=partial(names_of, wanted), progress=progress)
    if out is None and is_bundle(source.path):
        return _open_given(source, wanted)
    at_home = bundles_dir() / source.key
    if not (force or out or chunk_sizes or weights):
        bundle = _open_if_complete(at_home, wanted)
        if bundle is not None:
            return bundle
    from edgellm.export import export  # 0.4 s, and rarely needed

    def export_once() -> Bundle:
        return export(
            source.path,
            out or at_home,
            name=name,
            source=source.spec,
            precisions=wanted,
            chunk_sizes=chunk_sizes,
            weights=weights,
            calibration=calibration,
            lora=lora,
            force=force,
            mend=out is None,
            progress=progress,
        )

    if source.member is not None and not source.downloaded_now and source.member.is_damaged():
        _download_again(source, "its sha256 is not that of the file that was published", progress)
        return export_once()
    try:
        return export_once()
    except ModelFormatError as error:
        # a file without a known sha256 cannot be checked against the published one in another way
        unchecked = source.member is not None and source.member.sha256 is None
        if not unchecked or source.downloaded_now:
            raise
        _download_again(source, str(error), progress)
        return export_once()


def prepared(name: str, *, precisions: Precisions) -> Bundle | None:
    """Open the bundle of a model without any download or export; None if it is not prepared.

    Raises:
        BundleError: see `prepare`.
    """
    source = resolve_here(name)
    if source is None:
        return None
    if is_bundle(source.path):
        return _open_given(source, precisions)
    return _open_if_complete(bundles_dir() / source.key, precisions)


def config_here(name: str) -> ModelConfig | None:
    """Return the config of a model on this machine; None if there is none that can be read."""
    from edgellm.graphs.checkpoint import open_checkpoint  # 0.1 s, and rarely needed

    with contextlib.suppress(EdgeLLMError):
        source = resolve_here(name)
        if source is not None and is_bundle(source.path):
            return open_bundle(source.path).config
        if source is not None:
            return open_checkpoint(source.path).config
    return None


def _open_if_complete(path: Path, precisions: Precisions) -> Bundle | None:
    """Open the bundle at `path`; None if it has to be exported, wholly or in part.

    Raises:
        BundleError: the bundle is of a later edgellm.
    """
    if not path.exists():
        return None
    try:
        bundle = open_bundle(path)
    except BundleError:
        if is_newer(path):
            raise
        return None
    wanted = names_of(precisions, bundle.config)
    return bundle if set(wanted) <= set(bundle.manifest.precisions) else None


def _download_again(source: Source, why: str, progress: ProgressCallback | None) -> None:
    assert source.member is not None
    _log.warning("%s: damaged (%s); downloading it again", source.path, why)
    source.member.fetch(again=True, progress=progress)


def _open_given(source: Source, precisions: Precisions) -> Bundle:
    try:
        bundle = open_bundle(source.path)
    except BundleError as error:
        raise BundleError(f"{error}: {_export_command(source.path)} --force`") from None
    missing = sorted({*names_of(precisions, bundle.config)} - set(bundle.manifest.precisions))
    if missing:
        raise BundleError(
            f"{source.path}: precision {', '.join(missing)} is not in this bundle; export it with "
            f"{_export_command(source.path)} --precisions {','.join(missing)}`"
        )
    return bundle


def _export_command(path: Path) -> str:
    """Return the command that exports the bundle at `path` again, without the closing quote."""
    made_of = recorded_source(path) or "MODEL"
    return f"`edgellm export {shlex.quote(made_of)} -o {shlex.quote(str(path))}"
