"""An exported model: one folder that holds everything the runtime reads.

    manifest.json            what is here, with the size and sha256 of every file
    tokenizer.json           for the `tokenizers` library
    chat_template.jinja      if the model has one
    <precision>/               NNN.onnx (any chunk size), NNN.cC.onnx (static), weights.bin
    head-<kind>/             head.onnx, weights.bin with the embedding
    packed/                  weights.bin for the native kernels, embedding and head among them
    reference/               weights.bin: a text in float32, to compare graphs with
    keys/                    weights.bin: what was done to keys, and norms of Q and K (see
                             key_basis.py)

Graphs of a folder share its weights.bin, which ONNX Runtime and numpy map into memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import BundleError, EdgeLLMError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.graphs.typed_json import parse
from edgellm.store.home import replacing_file, sha256_of

FORMAT = "edgellm-bundle"
# Goes up when the layout or the recipe of a precision changes, so that old bundles are made again.
FORMAT_VERSION = 7
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
# The precision that the native kernels read; all others are graphs.
PACKED = "packed"
# Defaults of a model that a manifest may hold, by the names of `GenerationOptions`.
GENERATION: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    "repeat_penalty": float,
}
# Remembers which size and time of change each file had when its sha256 was last right, so
# that a start reads no weights it does not use; not part of the bundle.
_CHECKED = ".checked.json"
# What chunks cost on this machine (see costs.py); not part of the bundle either.
COSTS = ".costs.json"


@dataclass(frozen=True)
class FileEntry:
    """Size and content of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShadowEntry:
    """A layer of which the host computes what its grid clips (see `quantize/shadow.py`).

    Attributes:
        scale, bits: of the grid of its input.
        importance: the share of its input's energy that the shadow saves.
    """

    scale: float
    bits: int
    importance: float


@dataclass(frozen=True)
class PrecisionEntry:
    """One exported precision (see `export/precisions.py`).

    Attributes:
        chunk_sizes: the static sizes.
        any_size: whether graphs for any chunk size are there as well.
        import_report: how its weights came in (see `ImportSummary`).
        arrays: weights that are read by name; those of graphs are not.
        kinds: how packed arrays are written, by the names of `kernels/quantized.py`.
        host_tokens: how many of a sequence's first tokens are not for these graphs (see
            `export/calibrate.py`).
        calibration: how static scales were chosen (see `CalibrationOptions`); empty without them.
        shadows: layers whose segments are cut for the host, by their names.
        errors: how far each segment was from float32 when it was exported, and a whole text (see
            `measure_errors`).
    """

    description: str
    head: str | None
    chunk_sizes: tuple[int, ...]
    any_size: bool
    import_report: Mapping[str, Any]
    arrays: Mapping[str, StoredArray]
    kinds: Mapping[str, str] = field(default_factory=dict)
    host_tokens: int = 0
    calibration: Mapping[str, Any] = field(default_factory=dict)
    shadows: Mapping[str, ShadowEntry] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def cut_segments(self) -> dict[int, str]:
        """The segments with halves, each with the down_proj between them: that of the layer before,
        whose attention it follows."""
        return {int(name.split(".")[1]) + 1: name for name in self.shadows}


@dataclass(frozen=True)
class HeadEntry:
    """An LM head and the embedding table that goes with it.

    Attributes:
        embedding: `codes` and `scale` (int8 groups) or `values` (float32), in the weights file.
        import_report: as of a precision.
    """

    embedding: Mapping[str, StoredArray]
    import_report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizerEntry:
    """What tokenizer.json does not say.

    Attributes:
        bos: text of the begin-of-sequence token, or None.
        add_bos: whether a prompt starts with it.
        eos: texts of all tokens that end an answer, the model's own first.
        fim: texts of the infill tokens that the model file names, by their roles in `fim.py`.
    """

    bos: str | None
    add_bos: bool
    eos: tuple[str, ...]
    fim: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        weights: what linear layers of float tensors have become (see `WeightReader`).
        reference: arrays of a text in float32 (see `reference.py`), if there are graphs of chunks.
        keys: arrays of the basis of keys in all precisions, and norms of Q and K (see
            `key_basis.py`).
    """

    name: str
    source: str
    source_bytes: int
    config: ModelConfig
    tokenizer: TokenizerEntry
    generation: Mapping[str, Any]
    versions: Mapping[str, str]
    precisions: Mapping[str, PrecisionEntry]
    heads: Mapping[str, HeadEntry]
    files: Mapping[str, FileEntry]
    source_sha256: str = ""
    weights: str = "auto"
    reference: Mapping[str, StoredArray] = field(default_factory=dict)
    keys: Mapping[str, StoredArray] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, values: Any, *, origin: str) -> Manifest:
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise BundleError(f"{origin}: not the manifest of an edgellm bundle")
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise BundleError(
                f"{origin}: bundle format {version}; this edgellm reads format {FORMAT_VERSION}"
            )
        content = {k: v for k, v in values.items() if k not in ("format", "format_version")}
        try:
            return parse(cls, content, where="manifest")
        except EdgeLLMError as error:
            raise BundleError(f"{origin}: damaged manifest ({error})") from None


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files are complete and unchanged."""

    path: Path
    manifest: Manifest

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    @property
    def bytes(self) -> int:
        """Size on disk, without the manifest."""
        return sum(entry.bytes for entry in self.manifest.files.values())

    def precision(self, name: str) -> PrecisionEntry:
        if name not in self.manifest.precisions:
            raise BundleError(
                f"{self.path}: precision {name} is not in this bundle; it has "
                + ", ".join(self.manifest.precisions)
            )
        return self.manifest.precisions[name]


def map_arrays(root: Path, arrays: Mapping[str, StoredArray]) -> dict[str, NDArray[Any]]:
    """Map arrays of the bundle at `root`; their pages are read when they are used."""
    files = {
        name: np.memmap(root / name, dtype=np.uint8, mode="r")
        for name in {array.file for array in arrays.values()}
    }
    mapped = {}
    for name, array in arrays.items():
        count = math.prod(array.shape) * np.dtype(array.dtype).itemsize
        data = np.asarray(files[array.file])[array.offset : array.offset + count]
        mapped[name] = data.view(array.dtype).reshape(array.shape)
    return mapped


def is_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_bundle(path: Path, *, verify: bool = False) -> Bundle:
    """Open a bundle after checking the manifest against its config, and every file against it.

    Args:
        verify: read and hash every file, even those that have not changed since the last check.

    Raises:
        BundleError: no bundle, another format, arrays that do not fit the config, or a file that
            is missing, cut off or changed.
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
    """The manifest alone, without looking at the files."""
    from edgellm.store.bundle_check import check_manifest  # it is about the classes of this file

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


def with_files(
    manifest: Manifest, path: Path, *, on_file: Callable[[str], None] | None = None
) -> Manifest:
    """The manifest with the size and sha256 of every file that is in the folder now.

    Raises:
        BundleError: a file that was in it, or any that the model needs, is not there.
    """
    from edgellm.store.bundle_check import check_manifest  # it is about the classes of this file

    files: dict[str, FileEntry] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_dir() or name == MANIFEST or name.startswith("."):
            continue
        known = manifest.files.get(name)
        if known is None:
            known = FileEntry(file.stat().st_size, sha256_of(file))
        files[name] = known
        if on_file is not None:
            on_file(name)
    lost = sorted(manifest.files.keys() - files.keys())
    if lost:
        raise BundleError(f"{path}: {lost[0]} is missing; export the model again")
    complete = replace(manifest, files=files)
    check_manifest(complete, origin=str(path))
    return complete


def stamp_of(file: Path, entry: FileEntry, *, origin: Path) -> tuple[int, int]:
    """Size and time of change of a file of the bundle at `origin`, if the size is right."""
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
        with replacing_file(path / _CHECKED) as partial:
            partial.write_text(json.dumps(values), encoding="utf-8")
    except OSError:
        pass  # a read-only bundle is checked in full at each start
