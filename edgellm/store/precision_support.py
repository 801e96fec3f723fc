"""Support of models by precisions; the runtime, which has no exporter, asks here as well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from edgellm.errors import BundleError, UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.store.bundle import read_manifest, write_manifest
from edgellm.store.home import delete_abandoned, delete_folder, locked
from edgellm.store.manifest import PACKED, Manifest
from edgellm.store.reference import FOLDER as REFERENCE

# Precisions around a rotated residual stream (see `export/rotated.py`).
ROTATED = ("w8a8", "w8a16-qdq", "w8a8-qdq")
# Precisions with static scales, calibrated without a sequence's first tokens: the host has those.
STATIC = ("w8a16-qdq", "w8a8-qdq")
# Precisions that can have a model's experts computed on the host, between two graphs.
_BESIDE_EXPERTS = (PACKED, "f32", "f16", "w4a16", "w8a8")
_EXPERTS = "it has experts, which are computed on the host beside f32, f16, w4a16 and w8a8 alone"
# Precision names, or a function that returns the names suiting a model's config.
Precisions = Iterable[str] | Callable[[ModelConfig], Iterable[str]]


def names_of(precisions: Precisions, config: ModelConfig) -> list[str]:
    """Return the names of the precisions for a model, each once, in alphabetical order."""
    return sorted(set(precisions(config) if callable(precisions) else precisions))


def why_not(precision: str, config: ModelConfig) -> str | None:
    """Return why a precision cannot compute a model, as text for an error; None if it can."""
    if config.native_parts:
        return None if precision == PACKED else _native(config)
    if config.has_experts and precision not in _BESIDE_EXPERTS:
        return _EXPERTS
    if precision not in ROTATED:
        return None
    if config.norm == "layer":
        return "its layer norms take a mean from the residual, which does not commute with rotating"
    if any(layer.norms != "pre" for layer in config.layers):
        return (
            "it normalizes what attention and MLP add to the residual, with weights that do not "
            "commute with rotating"
        )
    return None


def _native(config: ModelConfig) -> str:
    return f"it has {config.native_parts}, which the C++ kernels alone compute"


def require(precision: str, config: ModelConfig, *, among: Sequence[str]) -> None:
    """Refuse a precision that cannot compute a model.

    Args:
        among: all available precisions; the error names those that can compute the model.

    Raises:
        UnsupportedModelError: the precision cannot compute the model.
    """
    if why_not(precision, config) is not None:
        raise _refusal(precision, config, among)


def first_supported(precisions: Sequence[str], config: ModelConfig) -> str:
    """Return the first precision that can compute a model.

    Raises:
        UnsupportedModelError: no precision can.
    """
    usable = (precision for precision in precisions if why_not(precision, config) is None)
    precision = next(usable, None)
    if precision is None:
        raise _refusal(precisions[0], config, precisions)
    return precision


def _refusal(precision: str, config: ModelConfig, among: Sequence[str]) -> UnsupportedModelError:
    if config.native_parts:
        return UnsupportedModelError(
            f"precision {precision} cannot compute {config.model_type}: {_native(config)}; take "
            f"`prefill` and `decode` native, or export {PACKED} alone"
        )
    if why_not(precision, config) == _EXPERTS:
        return UnsupportedModelError(
            f"precision {precision} cannot compute {config.model_type}: {_EXPERTS}; take `prefill` "
            f"and `decode` native, or export {PACKED} or one of these"
        )
    others = [other for other in among if why_not(other, config) is None]
    advice = " or ".join(others) or "another `prefill`: native, cpu, openvino"
    return UnsupportedModelError(
        f"precision {precision} rotates the residual, which {config.model_type} does not bear: "
        f"{why_not(precision, config)}; take {advice}"
    )


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
