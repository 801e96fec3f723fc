"""Models in EDGELLM_HOME: lists, descriptions with memory needs, and deletion.

`prepare` makes the bundle of a model, and downloads the model if need be, as `edgellm.load` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.backends.providers import CPU, PROVIDERS
from edgellm.backends.registry import NATIVE
from edgellm.backends.selection import Selection, precisions_of, select
from edgellm.engine.memory import HOST, Copy, MemoryEstimate, estimate, weight_copies
from edgellm.errors import BundleError, EdgeLLMError, SourceError
from edgellm.graphs.architecture import family_of
from edgellm.graphs.tensors import parameters, used_parameters
from edgellm.options import EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle, check_sizes, open_bundle, read_manifest
from edgellm.store.home import (
    bundles_dir,
    delete_abandoned,
    delete_abandoned_at_home,
    delete_folder,
    locked,
)
from edgellm.store.manifest import MTP, imported
from edgellm.store.precision_support import needs_host, remove_precisions
from edgellm.store.prepare import prepare
from edgellm.store.sources import (
    ALIASES,
    DEFAULT_MODEL,
    KNOWN,
    bundle_label,
    local_path,
    resolve_here,
    wheel_member,
)

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "HOST",
    "KNOWN",
    "Bundle",
    "Copy",
    "ModelDescription",
    "PrecisionDescription",
    "StoredModel",
    "delete_model",
    "describe",
    "imported",
    "is_here",
    "is_new",
    "list_models",
    "prepare",
    "pull",
]


@dataclass(frozen=True)
class StoredModel:
    """A folder of EDGELLM_HOME that ought to be a bundle.

    Attributes:
        bytes: size of all files of the bundle.
        damage: description of the damage, empty for an intact bundle; of a damaged bundle only the
            folder is known.
    """

    folder: Path
    name: str = ""
    bytes: int = 0
    precisions: tuple[str, ...] = ()
    damage: str = ""


@dataclass(frozen=True)
class PrecisionDescription:
    """A precision of a bundle.

    Attributes:
        bytes: size of the files in the precision's own folder.
        uses: steps that run in it with the usual options: prefill, decode.
        weights: import of its weights from the model file, in words.
    """

    name: str
    description: str
    bytes: int
    chunk_sizes: tuple[int, ...]
    uses: tuple[str, ...]
    weights: str


@dataclass(frozen=True)
class ModelDescription:
    """A bundle, and its memory needs with the usual options.

    Attributes:
        parameters: number of weights of the model.
        used_parameters: number of those that a token uses: of the experts, where there are some,
            its own alone.
        memory: estimate with a full KV cache.
        copies: copies of weights that are kept, by the way in which prompts are computed.
        mtp_bytes: size of its head that predicts further tokens, for drafts; 0: the bundle lacks
            the head that models of its family have; None: they have none.
    """

    bundle: Bundle
    parameters: int
    used_parameters: int
    precisions: tuple[PrecisionDescription, ...]
    memory: MemoryEstimate
    copies: Mapping[str, tuple[Copy, ...]]
    mtp_bytes: int | None = None


def pull(name: str = DEFAULT_MODEL, *, progress: ProgressCallback | None = None) -> Bundle:
    """Download a model and export it, so that `edgellm.load` finds it there.

    Raises:
        EdgeLLMError: see `prepare`.
    """
    return prepare(name, precisions=precisions_of(EngineOptions()), progress=progress)


def is_here(name: str) -> bool:
    """Whether a name means a model that is known without asking the network."""
    return resolve_here(name) is not None


def is_new(name: str) -> bool:
    """Whether a model comes from the package index and has not been downloaded yet."""
    member = wheel_member(name)
    return member is not None and not member.path.exists()


def list_models() -> list[StoredModel]:
    """Return all models in EDGELLM_HOME, sorted by folder."""
    return [_stored(folder) for folder in _bundle_folders()]


def describe(
    name: str = DEFAULT_MODEL, *, verify: bool = False, progress: ProgressCallback | None = None
) -> ModelDescription:
    """Describe a model and its memory needs; `pull` it first.

    Args:
        verify: whether to read and check every file.

    Raises:
        BundleError: a file is damaged.
    """
    bundle = pull(name, progress=progress)
    if verify:
        bundle = open_bundle(bundle.path, verify=True)
    options = EngineOptions()
    selection = select(options, bundle.config)
    needed = estimate(bundle, options, selection)
    precisions = tuple(_precisions(bundle, selection))
    counts = parameters(bundle.config), used_parameters(bundle.config)
    copies = dict(_copies(bundle, selection))
    return ModelDescription(bundle, *counts, precisions, needed, copies, _mtp_bytes(bundle))


def _copies(bundle: Bundle, usual: Selection) -> Iterator[tuple[str, tuple[Copy, ...]]]:
    """Iterate over the usual back ends, and those with each precision of chunks in the bundle."""
    yield usual.prefill, weight_copies(bundle, usual)
    decode = NATIVE if needs_host(bundle.config) else usual.decode
    for name in bundle.manifest.precisions:
        takers = [each for each, provider in PROVIDERS.items() if name in provider.precisions]
        for prefill in takers[:2]:  # all accelerators alike
            if (prefill, name) == (usual.prefill, usual.prefill_precision(bundle.config)):
                continue
            way = Selection(prefill=prefill, decode=decode, policy="serial", precision=name)
            place = prefill if prefill == CPU else "accelerator"
            yield f"{place} in {name}", weight_copies(bundle, way)


def _mtp_bytes(bundle: Bundle) -> int | None:
    if not family_of(bundle.config.model_type).mtp:
        return None
    return sum(f.bytes for name, f in bundle.manifest.files.items() if name.startswith(f"{MTP}/"))


def delete_model(name: str, *, precisions: Sequence[str] = ()) -> list[str]:
    """Delete a model's bundles and its download; return what was deleted, in words.

    Args:
        name: name for `edgellm.load`, or name of a folder in EDGELLM_HOME.
        precisions: precisions to delete, where the rest is kept; empty: all.

    Raises:
        SourceError: no model of that name is exported.
        BundleError: a bundle has not these precisions, or no others.
    """
    folders = [folder for folder in _bundle_folders() if _is_named(folder, name)]
    if not precisions:
        deleted = [str(path) for path in _delete(name, folders)]
    else:
        freed = sum(remove_precisions(folder, precisions) for folder in folders)
        deleted = [f"{', '.join(precisions)} of {name}, {freed / 1e6:.1f} MB"] if folders else []
    if not deleted:
        raise SourceError(f"{name}: no exported model of that name; see `edgellm ls`")
    delete_abandoned_at_home()
    return deleted


def _stored(folder: Path) -> StoredModel:
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except EdgeLLMError as error:
        return StoredModel(folder, damage=str(error))
    size = sum(entry.bytes for entry in manifest.files.values())
    return StoredModel(folder, manifest.name, size, tuple(manifest.precisions))


def _precisions(bundle: Bundle, selection: Selection) -> Iterator[PrecisionDescription]:
    used = {
        "prefill": selection.prefill_precision(bundle.config),
        "decode": selection.decode_precision(bundle.config),
    }
    for name, entry in bundle.manifest.precisions.items():
        files = bundle.manifest.files.items()
        yield PrecisionDescription(
            name=name,
            description=entry.description,
            bytes=sum(file.bytes for path, file in files if path.startswith(f"{name}/")),
            chunk_sizes=tuple(entry.chunk_sizes),
            uses=tuple(use for use, precision in used.items() if precision == name),
            weights=imported(bundle.manifest, name).details(),
        )


def _delete(name: str, folders: Sequence[Path]) -> list[Path]:
    """Delete bundles, the model's download, and leftovers of killed processes; return the paths."""
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
        # the manifest is not readable: only the folder's name has the label of the model
        return folder.name.rpartition("-")[0] == bundle_label(name)
    return name in (manifest.name, manifest.source) or manifest.source == str(here)
