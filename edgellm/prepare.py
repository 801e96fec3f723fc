"""A model name to an opened bundle: resolve, export once, open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgellm.bundle import Bundle, ExportProgress, is_bundle, is_outdated, open_bundle
from edgellm.errors import BundleError
from edgellm.home import bundles_dir
from edgellm.sources import Source, resolve

if TYPE_CHECKING:
    from edgellm.export.calibrate import CalibrationOptions


def prepare(
    name: str,
    *,
    flavours: Iterable[str],
    calibration: CalibrationOptions | None = None,
    progress: ExportProgress | None = None,
    force: bool = False,
) -> Bundle:
    """The bundle of a model, exported into EDGELLM_HOME on first use and after a change of format.

    Args:
        name: see `sources.py`; the folder of a bundle is opened as it is.
        flavours: exported if they are not there yet.
        calibration, progress: see `export`.
        force: export again.

    Raises:
        SourceError, ModelFormatError, UnsupportedModelError, BundleError, ExportError
    """
    wanted = sorted(set(flavours))
    source = resolve(name)
    if is_bundle(source.path):
        return _open_given(source, wanted)
    out = bundles_dir() / source.key
    force = force or is_outdated(out)
    if not force and is_bundle(out):
        bundle = open_bundle(out)
        if set(wanted) <= set(bundle.manifest.flavours):
            return bundle
    from edgellm.export import export  # 0.4 s, and rarely needed

    return export(
        source.path,
        out,
        name=name,
        source=source.spec,
        flavours=wanted,
        calibration=calibration,
        force=force,
        progress=progress,
    )


def _open_given(source: Source, flavours: Iterable[str]) -> Bundle:
    bundle = open_bundle(source.path)
    missing = sorted(set(flavours) - set(bundle.manifest.flavours))
    if missing:
        raise BundleError(
            f"{source.path}: flavour {', '.join(missing)} is not in this bundle; export it with "
            f"`edgellm export {bundle.manifest.source} -o {source.path} "
            f"--flavours {','.join(missing)}`"
        )
    return bundle
