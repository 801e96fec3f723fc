"""The content of a bundle's manifest.json, mapping of its arrays, and a summary of its import."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import BundleError, EdgeLLMError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.graphs.fields import parse

FORMAT = "edgellm-bundle"
# Raised when the layout or the recipe of a precision changes, so that old bundles are made again.
FORMAT_VERSION = 7
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Name of the precision that the native kernels read; all other precisions are graphs.
PACKED = "packed"
# Folder of the head that predicts the token after the next, if the model has one.
MTP = "mtp"
# Sampling defaults of a model that a manifest may hold, by the names of `GenerationOptions`.
GENERATION: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    "repeat_penalty": float,
}


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 of one file of a bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShadowEntry:
    """A linear layer with a shadow: the host computes what its input grid clips.

    See `quantize/calibration.py`.

    Attributes:
        scale, bits: the grid of the layer's input.
        importance: share of the input's energy that the shadow saves.
    """

    scale: float
    bits: int
    importance: float


@dataclass(frozen=True)
class PrecisionEntry:
    """An exported precision of the model (see `export/precisions.py`).

    Attributes:
        description: one line for people.
        head: kind of the LM head and embedding that go with it; None: they are part of it.
        chunk_sizes: static chunk sizes, in tokens, that graphs were exported for.
        any_size: whether the bundle has graphs for any chunk size as well.
        import_report: exact and rounded weights (see `ImportSummary`).
        arrays: weights that are read by name; weights of graphs are not among them.
        kinds: quantized kinds of packed matrices, by the names of `kernels/quantized.py`.
        host_tokens: number of a sequence's first tokens that the host computes instead of these
            graphs (see `export/calibrate.py`).
        calibration: choice of static scales (see `CalibrationOptions`); empty without them.
        shadows: down_proj layers with a shadow, whose segments are cut in halves, by their names.
        errors: distance of each segment, and of a whole text, from float32, measured at export
            (see `measure_errors`).
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
        """Name of the down_proj between the halves of each segment that is cut in two.

        Segment i + 1 holds the down_proj of layer i, whose attention it follows.
        """
        return {int(name.split(".")[1]) + 1: name for name in self.shadows}


@dataclass(frozen=True)
class HeadEntry:
    """An LM head and the embedding table that goes with it.

    Attributes:
        embedding: arrays `codes` and `scale` (int8 groups) or `values` (float32) in the weights
            file.
        import_report: as in `PrecisionEntry`.
    """

    embedding: Mapping[str, StoredArray]
    import_report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizerEntry:
    """Special tokens of a model that its tokenizer.json does not name.

    Attributes:
        bos: text of the begin-of-sequence token, or None.
        add_bos: whether a prompt starts with that token.
        eos: texts of all tokens that end an answer, the model's own first.
        fim: texts of the infill tokens that the checkpoint names, by their roles in `fim.py`.
    """

    bos: str | None
    add_bos: bool
    eos: tuple[str, ...]
    fim: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MtpEntry:
    """A head that predicts the token after the next, for the native kernels (see `mtp.py`).

    Attributes:
        arrays: its tensors; embedding and LM head are those of the model.
        kinds: quantized kinds of its matrices, as in `PrecisionEntry`.
    """

    arrays: Mapping[str, StoredArray]
    kinds: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        file_type: quantization that a GGUF file names for itself, e.g. Q4_K_M.
        weights: what float weights of linear layers are rounded to, `auto`, `int8` or `int4` (see
            `WeightReader`).
        reference: arrays of a text in float32 (see `reference.py`), if there are graphs of chunks.
        keys: arrays of the key basis of all precisions, and norms of Q and K (see
            `key_basis.py`).
        mtp: the model's head for drafts; None: the checkpoint has none, or was exported before.
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
    file_type: str = ""
    weights: str = "auto"
    reference: Mapping[str, StoredArray] = field(default_factory=dict)
    keys: Mapping[str, StoredArray] = field(default_factory=dict)
    mtp: MtpEntry | None = None

    def to_json(self) -> dict[str, Any]:
        values = {**asdict(self), "config": self.config.to_json()}
        if self.mtp is None:
            del values["mtp"]
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **values}

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
            raise BundleError(
                f"{origin}: made by another version of edgellm, or damaged ({error}); export the "
                "model again"
            ) from None


def forget_pages(array: NDArray[Any]) -> None:
    """Take the file that an array is mapped from out of memory; it is read again when it is used.

    Windows has no call for that: it takes pages back itself where memory is short.
    """
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.base
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        with suppress(OSError):  # of pages that the process holds in memory
            base.madvise(mmap.MADV_DONTNEED)


def map_arrays(root: Path, arrays: Mapping[str, StoredArray]) -> dict[str, NDArray[Any]]:
    """Map arrays of the bundle at `root` into memory; the disk is read when they are used."""
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


@dataclass(frozen=True)
class ImportSummary:
    """The totals of an `ImportReport`; norms and biases, always exact, are left out.

    Attributes:
        exact_tensors: number of matrices with every value as in the file.
        requantized_tensors: number of matrices that were rounded again.
        mean_relative_error, worst_relative_error: errors of the matrices rounded again.
        worst_tensor: name of the matrix with the largest error; None where all are exact.
        file_bytes, decode_bytes: bytes of matrices that a decode step of one token reads, in the
            file and packed; 0 if not known.
        taken: number of matrices by the file's type and then by the bundle's kind.
    """

    exact_tensors: int = 0
    requantized_tensors: int = 0
    mean_relative_error: float = 0.0
    worst_tensor: str | None = None
    worst_relative_error: float = 0.0
    file_bytes: int = 0
    decode_bytes: int = 0
    taken: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ImportSummary:
        """Read the summary in a manifest.

        Raises:
            ModelFormatError: a value has another type.
        """
        return parse(cls, dict(values), where="import_report")

    @property
    def tensors(self) -> int:
        return self.exact_tensors + self.requantized_tensors

    @property
    def storage(self) -> dict[str, int]:
        """Number of matrices by the type that the checkpoint file holds them in."""
        return {storage: sum(kinds.values()) for storage, kinds in self.taken.items()}

    @property
    def kinds(self) -> dict[str, int]:
        """Number of matrices by the kind that the bundle holds them in."""
        counts: Counter[str] = Counter()
        for kinds in self.taken.values():
            counts.update(kinds)
        return dict(counts)

    def joined(self, other: ImportSummary) -> ImportSummary:
        """Return the summary of this one's and `other`'s matrices together."""
        count = self.requantized_tensors + other.requantized_tensors
        sums = (s.mean_relative_error * s.requantized_tensors for s in (self, other))
        worst = max(self, other, key=lambda s: s.worst_relative_error)
        pairs = [s.taken for s in (self, other)]
        return ImportSummary(
            self.exact_tensors + other.exact_tensors,
            count,
            sum(sums) / count if count else 0.0,
            worst.worst_tensor,
            worst.worst_relative_error,
            self.file_bytes + other.file_bytes,
            self.decode_bytes + other.decode_bytes,
            {
                name: dict(sum((Counter(taken.get(name, {})) for taken in pairs), Counter()))
                for name in sorted({*pairs[0], *pairs[1]})
            },
        )

    def __str__(self) -> str:
        """Return the summary as one line of text."""
        if not self.requantized_tensors:
            return f"all {self.tensors} tensors as in the file"
        return (
            f"{self.exact_tensors} of {self.tensors} tensors as in the file, "
            f"{self.requantized_tensors} rounded again (largest error "
            f"{_percent(self.worst_relative_error)} in {self.worst_tensor})"
        )

    def details(self) -> str:
        """Return the summary as one line with the mean error and every type and kind too."""
        pairs = [
            f"{count} {storage} as {kind}"
            for storage, kinds in self.taken.items()
            for kind, count in kinds.items()
        ]
        rounded = self.requantized_tensors
        mean = f", mean error {_percent(self.mean_relative_error)}" if rounded else ""
        return f"{self}{mean}{': ' if pairs else ''}{', '.join(pairs)}"


def imported(manifest: Manifest, precision: str) -> ImportSummary:
    """Return the import summary of a precision's weights, LM head and embedding included."""
    entry = manifest.precisions[precision]
    summary = ImportSummary.of(entry.import_report)
    if entry.head is None:
        return summary
    return summary.joined(ImportSummary.of(manifest.heads[entry.head].import_report))


def rounding_notes(manifest: Manifest, precisions: Collection[str]) -> Iterator[str]:
    """Yield a line for each precision whose weights are not all as in the file."""
    for precision in sorted(precisions):
        summary = imported(manifest, precision)
        if summary.requantized_tensors:
            of = "" if len(precisions) == 1 else f" of {precision}"
            yield f"weights{of}: {summary}"


def _percent(error: float) -> str:
    return f"{100 * error:.2g} %"
