"""Export of a checkpoint to a bundle folder, which is complete or absent at every moment."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edgellm.errors import BundleError, EdgeLLMError, ExportError, OptionError
from edgellm.export.calibrate import CalibrationOptions
from edgellm.export.equalized import EqualizedCheckpoint, choose_basis, store_basis
from edgellm.export.precision_writer import (
    store_mtp_weights,
    store_packed_weights,
    write_head,
    write_precision,
)
from edgellm.export.precisions import (
    DEFAULT_CHUNK_SIZES,
    PRECISIONS,
    check_request,
    default_precisions,
)
from edgellm.export.reference_writer import measure_errors, reference_tokens, store_reference
from edgellm.export.source_checkpoint import (
    Merge,
    MergedCheckpoint,
    digest_of,
    file_type_of,
    weight_files,
)
from edgellm.export.tokenizer_import import import_tokenizer
from edgellm.export.weight_reader import FLOAT_WEIGHTS, WeightReader
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint, open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.progress import Progress, ProgressCallback
from edgellm.store import bundle as bundles
from edgellm.store.bundle import Bundle, is_newer, is_outdated
from edgellm.store.home import delete_abandoned, locked, partial_folder, replacing_folder, sync_tree
from edgellm.store.key_basis import KeyBasis, open_key_basis
from edgellm.store.manifest import MTP, PACKED, Manifest, MtpEntry, PrecisionEntry
from edgellm.store.precision_support import Precisions, names_of, require
from edgellm.store.reference import FOLDER as REFERENCE
from edgellm.store.reference import open_reference
from edgellm.text.tokenizer import Tokenizer

_TOOLS = ("edgellm", "onnxruntime", "onnx-ir", "gguf", "safetensors", "tokenizers", "numpy")


def export(
    checkpoint_path: Path,
    out: Path,
    *,
    name: str,
    source: str,
    precisions: Precisions | None = None,
    chunk_sizes: Sequence[int] | None = None,
    calibration: CalibrationOptions | None = None,
    weights: str | None = None,
    lora: Sequence[Merge] = (),
    force: bool = False,
    mend: bool = False,
    progress: ProgressCallback | None = None,
) -> Bundle:
    """Export a checkpoint to the bundle folder `out`, or add precisions to the bundle there.

    Two processes may export at once: the second one waits and finds the work done. No part of the
    bundle appears at `out` before it is complete.

    Args:
        checkpoint_path: the GGUF file or Hugging Face folder.
        name, source: model name and resolved source, recorded in the manifest.
        precisions: names from `PRECISIONS`, or a function of the config that returns them; None is
            `default_precisions`.
        chunk_sizes: static chunk sizes to export, in tokens; None keeps those of a bundle at `out`.
        calibration: options for the precisions with static scales.
        weights: rounding of float weights of linear layers, of `FLOAT_WEIGHTS`; None keeps that of
            the bundle at `out`, and is `auto` for a new one.
        lora: adapters (LoRA) to merge into the weights before these are rounded.
        force: replace the bundle at `out`.
        mend: replace edgellm's own folder at `out` if it is damaged or of an earlier format.
        progress: see `Progress`.

    Raises:
        ModelFormatError: see `open_checkpoint`.
        UnsupportedModelError: see `open_checkpoint`; or a precision cannot compute the model.
        OptionError: precisions or weights are unknown, chunk sizes are impossible, or weights or
            chunk sizes are not those of the bundle at `out`.
        BundleError: `out` is no bundle, or one of another model or of a later format, or it is
            damaged and neither `force` nor `mend` is set.
        ExportError: the disk is full or not writable.
    """
    wanted: Precisions = default_precisions if precisions is None else precisions
    if not callable(wanted):
        wanted = tuple(wanted)
        check_request(wanted, chunk_sizes)
    _check_weights(weights)
    out = out.absolute()
    source += "".join(f" + {path.absolute()}:{scale:g}" for path, scale in lora)
    with _disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with locked(out):
            delete_abandoned(out.parent, of=out.name, abandoned_s=0)
            present = _present_at(out, source, force=force, mend=mend)
            if present is not None:
                _check_same(out, present, chunk_sizes, weights)
            checkpoint: Checkpoint | None = None
            if present is None:
                checkpoint = _opened(checkpoint_path, lora)
                missing = _missing(wanted, checkpoint.config, (), chunk_sizes)
            else:
                missing = _missing(wanted, present.config, present.precisions, chunk_sizes)
                checkpoint = _opened(checkpoint_path, lora) if missing else None
            if checkpoint is not None:
                basis = _basis(out, present, checkpoint)
                exporter = _Exporter(
                    EqualizedCheckpoint(checkpoint, basis),
                    basis,
                    digest=_digest(checkpoint),
                    chunk_sizes=_sizes_of(present) or chunk_sizes or DEFAULT_CHUNK_SIZES,
                    calibration=calibration or CalibrationOptions(),
                    weights=(present.weights if present else weights) or "auto",
                    steps=_Steps(checkpoint, missing, progress),
                )
                if present is None:
                    exporter.new(out, name, source, missing)
                else:
                    exporter.add(out, present, missing)
    return bundles.open_bundle(out)


def _check_weights(weights: str | None) -> None:
    if weights is not None and weights not in FLOAT_WEIGHTS:
        raise OptionError(f"`weights` {weights}: allowed are {', '.join(FLOAT_WEIGHTS)}")


def _check_same(
    out: Path, present: Manifest, chunk_sizes: Sequence[int] | None, weights: str | None
) -> None:
    """Refuse other chunk sizes or another rounding than those of the bundle at `out`."""
    sizes = _sizes_of(present)
    if chunk_sizes is not None and sizes and set(sizes) != set(chunk_sizes):
        raise OptionError(
            f"`chunk_sizes` {', '.join(map(str, chunk_sizes))}: the bundle at {out} has "
            f"{', '.join(map(str, sizes))}; `force` replaces it"
        )
    if weights is not None and present.weights != weights:
        raise OptionError(
            f"`weights` {weights}: the bundle at {out} has {present.weights}; `force` replaces it"
        )


def _opened(path: Path, lora: Sequence[Merge]) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    return MergedCheckpoint(checkpoint, lora) if lora else checkpoint


def _digest(checkpoint: Checkpoint) -> str:
    """Return a digest of a checkpoint's files, and of the adapters that are merged into it."""
    digest = digest_of(weight_files(checkpoint))
    if not isinstance(checkpoint, MergedCheckpoint):
        return digest
    return hashlib.sha256((digest + checkpoint.digest).encode()).hexdigest()


def _missing(
    precisions: Precisions,
    config: ModelConfig,
    present: Collection[str],
    chunk_sizes: Sequence[int] | None,
) -> list[str]:
    """Check all requested precisions, and return those that are not in `present` yet."""
    names = names_of(precisions, config)
    check_request(names, chunk_sizes)
    for name in names:
        require(name, config, among=tuple(PRECISIONS))
    return [name for name in names if name not in present]


def _basis(out: Path, present: Manifest | None, checkpoint: Checkpoint) -> KeyBasis:
    """Return the key basis of the bundle at `out`, or a new one if there is none."""
    if present is None:
        return choose_basis(checkpoint)
    if present.config != checkpoint.config:
        raise BundleError(f"{out}: the bundle is of another model; `force` replaces it")
    return open_key_basis(out, present.keys, checkpoint.config)


class _Steps:
    """Counter of exported segments, for the progress callback."""

    def __init__(
        self, checkpoint: Checkpoint, precisions: Sequence[str], progress: ProgressCallback | None
    ) -> None:
        self._progress = progress
        self._done = 0
        graphs = [f for f in map(PRECISIONS.__getitem__, precisions) if f.segments is not None]
        measured = sum(not precision.token_by_token for precision in graphs)
        if checkpoint.config.has_experts:
            measured = 0
        rounds = len(precisions) + measured + (measured > 0)  # the reference is made once
        self._total = rounds * (checkpoint.config.layer_count + 1)

    def step(self, label: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(Progress(label, min(self._done, self._total), self._total))


class _Exporter:
    """Writer of the parts of a bundle, one precision after the other."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        basis: KeyBasis,
        *,
        digest: str,
        chunk_sizes: Sequence[int],
        calibration: CalibrationOptions,
        weights: str,
        steps: _Steps,
    ) -> None:
        self._checkpoint = checkpoint
        self._digest = digest
        self._weights = weights
        self._basis = basis
        self._chunk_sizes = chunk_sizes
        self._calibration = calibration
        self._steps = steps

    def new(self, out: Path, name: str, source: str, precisions: Sequence[str]) -> None:
        """Write a whole bundle to `out`."""
        with replacing_folder(out) as folder:
            imported = import_tokenizer(self._checkpoint)
            imported.save(folder)
            manifest = Manifest(
                name=name,
                source=source,
                source_bytes=sum(file.stat().st_size for file in weight_files(self._checkpoint)),
                source_sha256=self._digest,
                file_type=file_type_of(self._checkpoint),
                config=self._checkpoint.config,
                tokenizer=imported.entry,
                generation=imported.generation,
                versions={tool: _version(tool) for tool in _TOOLS},
                weights=self._weights,
                precisions={},
                heads={},
                files={},
                keys=store_basis(self._basis, self._checkpoint, folder),
            )
            for precision in precisions:
                manifest = self._precision(folder, manifest, precision, base=folder)
            _publish(out, folder, manifest)

    def add(self, out: Path, present: Manifest, precisions: Sequence[str]) -> None:
        """Export precisions into a scratch folder, move its folders to `out`, the manifest last."""
        with partial_folder(out.parent, of=out.name) as scratch:
            manifest = present
            for precision in precisions:
                manifest = self._precision(scratch, manifest, precision, base=out)
            for folder in scratch.iterdir():
                sync_tree(folder)
                shutil.rmtree(out / folder.name, ignore_errors=True)
                folder.replace(out / folder.name)
            _publish(out, out, manifest)

    def _precision(self, root: Path, manifest: Manifest, name: str, *, base: Path) -> Manifest:
        """Write a precision's folder into `root`, and return the manifest with that precision.

        Args:
            base: folder with the tokenizer and the files that the bundle has already.
        """
        precision = PRECISIONS[name]
        if precision.segments is None:
            return self._packed(root, manifest)
        tokenizer = Tokenizer(base, manifest.tokenizer, rows=manifest.config.vocab_size)
        arrays = manifest.reference
        # where experts are nearly as good, rounding chooses: rows far from float32 are no fault
        compared = not (precision.token_by_token or manifest.config.has_experts)
        if compared and not arrays:
            arrays = self._reference(root, tokenizer)
        heads = dict(manifest.heads)
        if precision.head is not None and precision.head not in heads:
            heads[precision.head] = write_head(self._reader(), root, precision.head)
        entry = write_precision(
            self._reader(),
            name,
            root,
            tokenizer=tokenizer,
            chunk_sizes=self._chunk_sizes,
            calibration=self._calibration,
            on_segment=lambda i: self._steps.step(f"exporting {name}: segment {i}"),
        )
        if compared:
            entry = replace(entry, errors=self._errors(root, base, name, entry, arrays))
        precisions = {**manifest.precisions, name: entry}
        return replace(manifest, precisions=precisions, heads=heads, reference=arrays)

    def _reference(self, root: Path, tokenizer: Tokenizer) -> Mapping[str, StoredArray]:
        tokens = reference_tokens(tokenizer, self._checkpoint.config, chunk=max(self._chunk_sizes))
        return store_reference(
            self._checkpoint,
            tokens,
            root,
            on_segment=lambda i: self._steps.step(f"computing in float32: segment {i}"),
        )

    def _errors(
        self,
        root: Path,
        base: Path,
        name: str,
        entry: PrecisionEntry,
        arrays: Mapping[str, StoredArray],
    ) -> Mapping[str, float]:
        config, new = self._checkpoint.config, (root / REFERENCE).exists()
        return measure_errors(
            self._checkpoint,
            open_reference(root if new else base, config, arrays),
            name,
            entry,
            root,
            on_segment=lambda i: self._steps.step(f"comparing {name}: segment {i}"),
        )

    def _reader(self) -> WeightReader:
        """Return a weight reader with a new import report."""
        return WeightReader(self._checkpoint, self._weights)

    def _packed(self, root: Path, manifest: Manifest) -> Manifest:
        folder = root / PACKED
        folder.mkdir()
        reader = self._reader()
        with WeightFile(folder) as file:
            kinds = store_packed_weights(
                reader,
                file,
                on_layer=lambda i: self._steps.step(f"exporting {PACKED}: layer {i}"),
            )
        entry = PrecisionEntry(
            PRECISIONS[PACKED].description,
            None,
            (),
            False,
            reader.report.to_json(),
            arrays=dict(file.arrays),
            kinds=kinds,
        )
        precisions = {**manifest.precisions, PACKED: entry}
        return replace(manifest, precisions=precisions, mtp=self._mtp(root))

    def _mtp(self, root: Path) -> MtpEntry | None:
        head = self._checkpoint.mtp
        if head is None:
            return None
        folder = root / MTP
        folder.mkdir()
        with WeightFile(folder) as file:
            reader = WeightReader(head, self._weights)
            return store_mtp_weights(reader, file, self._checkpoint.config)


def _version(tool: str) -> str:
    try:
        return importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


_log = logging.getLogger(__name__)


def _present_at(out: Path, source: str, *, force: bool, mend: bool) -> Manifest | None:
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


def _sizes_of(present: Manifest | None) -> Sequence[int]:
    """Return the chunk sizes of a bundle's precisions with chunks; empty if there are none."""
    entries = present.precisions.values() if present is not None else ()
    return next((entry.chunk_sizes for entry in entries if entry.any_size), ())


def _publish(out: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest in `folder`, after a check that all its files are there.

    Raises:
        ExportError: a file is missing.
    """
    try:
        bundles.write_manifest(folder, bundles.with_files(manifest, folder))
    except BundleError as error:
        raise ExportError(f"{out}: someone deleted files while it was written ({error})") from None


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
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
