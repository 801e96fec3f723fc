"""Checkpoint in, bundle out."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from filelock import FileLock

from edgellm import bundle as bundles
from edgellm.bundle import PANELS, Bundle, ExportProgress, FlavourEntry, HeadEntry, Manifest
from edgellm.calibrate import HOST_TOKENS, CalibrationOptions, Calibrator, choose_windows
from edgellm.errors import BundleError, EdgeLLMError, ExportError, OptionError
from edgellm.flavours import FLAVOURS, Flavour, ImportReport
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint, open_checkpoint
from edgellm.graphs.contract import HEAD_FILE, part_file, parts
from edgellm.graphs.linear import FloatLinear, Int8GroupLinear, Linear
from edgellm.graphs.segment import author_head, author_segment
from edgellm.home import replacing_folder
from edgellm.panel_writer import store_panels
from edgellm.quantize.int8 import quantize_groups
from edgellm.tokenizer import Tokenizer
from edgellm.tokenizer_import import import_tokenizer

DEFAULT_CHUNK_SIZES = (32, 128)
DEFAULT_FLAVOURS = (PANELS, "w8a8", "int4")
_TOOLS = ("edgellm", "onnxruntime", "onnx-ir", "gguf", "safetensors", "tokenizers", "numpy")


def export(
    checkpoint_path: Path,
    out: Path,
    *,
    name: str,
    source: str,
    flavours: Sequence[str] = DEFAULT_FLAVOURS,
    chunk_sizes: Sequence[int] = DEFAULT_CHUNK_SIZES,
    calibration: CalibrationOptions | None = None,
    force: bool = False,
    progress: ExportProgress | None = None,
) -> Bundle:
    """Export a checkpoint to the bundle folder `out`, or add missing flavours to the bundle there.

    Two processes may do this at once: the second one waits and finds the work done. Nothing
    appears under `out` before it is complete.

    Args:
        name, source: recorded in the manifest.
        flavours: names from `FLAVOURS`.
        chunk_sizes: static sizes to export; a bundle that is there keeps its own.
        calibration: for the flavours with static scales.
        force: replace the bundle at `out`.
        progress: called with a label, steps done and steps in all.

    Raises:
        ModelFormatError, UnsupportedModelError: see `open_checkpoint`.
        BundleError: something else is at `out`, or a damaged bundle and `force` is not set.
        ExportError: the disk is full or not writable.
    """
    check_flavours(flavours)
    if not chunk_sizes or any(not 1 <= size <= 4096 for size in chunk_sizes):
        raise OptionError(f"chunk sizes {list(chunk_sizes)}: numbers from 1 to 4096 are allowed")
    out = out.absolute()
    with _disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(out.with_name(f".{out.name}.lock")):
            present = _present(out, force=force)
            missing = [f for f in flavours if present is None or f not in present.flavours]
            if missing:
                checkpoint = open_checkpoint(checkpoint_path)
                exporter = _Exporter(
                    checkpoint,
                    chunk_sizes=_sizes_of(present) or chunk_sizes,
                    calibration=calibration or CalibrationOptions(),
                    steps=_Steps(checkpoint, missing, progress),
                )
                if present is None:
                    exporter.new(out, name, source, missing)
                else:
                    exporter.add(out, present, missing)
    return bundles.open_bundle(out)


class _Steps:
    """Counts segments for the progress callback."""

    def __init__(
        self, checkpoint: Checkpoint, flavours: Sequence[str], progress: ExportProgress | None
    ) -> None:
        self._progress = progress
        self._done = 0
        self._total = len(flavours) * (checkpoint.config.layers + 2)

    def step(self, label: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(label, min(self._done, self._total), self._total)


class _Exporter:
    """Writes the parts of a bundle, one flavour after the other."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        chunk_sizes: Sequence[int],
        calibration: CalibrationOptions,
        steps: _Steps,
    ) -> None:
        self._checkpoint = checkpoint
        self._chunk_sizes = chunk_sizes
        self._calibration = calibration
        self._steps = steps

    def new(self, out: Path, name: str, source: str, flavours: Sequence[str]) -> None:
        """A whole bundle at `out`."""
        with replacing_folder(out) as folder:
            imported = import_tokenizer(self._checkpoint)
            imported.save(folder)
            manifest = Manifest(
                name=name,
                source=source,
                source_bytes=sum(file.stat().st_size for file in _weight_files(self._checkpoint)),
                source_sha256=_digest(_weight_files(self._checkpoint)),
                config=self._checkpoint.config,
                tokenizer=imported.entry,
                generation=imported.generation,
                versions={tool: _version(tool) for tool in _TOOLS},
                flavours={},
                heads={},
                files={},
            )
            for flavour in flavours:
                manifest = self._flavour(folder, manifest, flavour, tokenizer=folder)
            bundles.write_manifest(folder, bundles.with_files(manifest, folder))

    def add(self, out: Path, present: Manifest, flavours: Sequence[str]) -> None:
        """Export into a scratch folder, move the new folders over, and last of all the manifest."""
        if present.config != self._checkpoint.config:
            raise BundleError(
                f"{out}: the bundle is of another model; export it again with --force"
            )
        scratch = out.with_name(f".{out.name}.scratch")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            manifest = present
            for flavour in flavours:
                manifest = self._flavour(scratch, manifest, flavour, tokenizer=out)
            for folder in scratch.iterdir():
                shutil.rmtree(out / folder.name, ignore_errors=True)
                folder.replace(out / folder.name)
            bundles.write_manifest(out, bundles.with_files(manifest, out))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _flavour(self, root: Path, manifest: Manifest, name: str, *, tokenizer: Path) -> Manifest:
        """A flavour's folder in `root`; the bundle's tokenizer is in the folder `tokenizer`."""
        flavour = FLAVOURS[name]
        if flavour.segments is None:
            return self._panels(root, manifest)
        heads = dict(manifest.heads)
        if flavour.head is not None and flavour.head not in heads:
            heads[flavour.head] = _export_head(self._checkpoint, root, flavour.head)
        self._steps.step(f"{name}: head")
        static = (1,) if flavour.token_by_token else tuple(sorted(set(self._chunk_sizes)))
        sizes: tuple[int | None, ...] = static if flavour.token_by_token else (None, *static)
        calibrator = self._calibrator(flavour, Tokenizer(tokenizer, manifest.tokenizer))
        report = ImportReport()
        folder = root / name
        folder.mkdir()
        with WeightFile(folder) as file:
            segments = []
            for segment in flavour.segments(self._checkpoint, file, report):
                segments.append(segment)
                if calibrator is not None:
                    file.flush()
                    calibrator.observe(segment, folder)
                self._steps.step(f"{name}: segment {segment.index}")
        shadows = calibrator.shadows() if calibrator else {}
        entry = FlavourEntry(
            flavour.description,
            flavour.head,
            static,
            None in sizes,
            report.to_json(),
            arrays={n: file.arrays[n] for s in shadows for n in (s, f"{s}.scale")},
            host_tokens=HOST_TOKENS if calibrator else 0,
            calibration=self._calibration.to_json() if calibrator else {},
            shadows=shadows,
        )
        grids = calibrator.grids() if calibrator else None
        for part in parts(self._checkpoint.config, entry.cut_segments):
            for chunk in sizes:
                model = author_segment(
                    segments[part.index],
                    self._checkpoint.config,
                    chunk=chunk,
                    half=part.half,
                    grids=grids,
                    basic_norms=flavour.basic_norms and chunk is not None,
                )
                ir.save(model, folder / part_file(part, chunk))
        return replace(manifest, flavours={**manifest.flavours, name: entry}, heads=heads)

    def _calibrator(self, flavour: Flavour, tokenizer: Tokenizer) -> Calibrator | None:
        if flavour.calibrated_bits is None:
            return None
        windows = choose_windows(tokenizer, self._calibration)
        embedded = self._checkpoint.tensor("embedding").float32()[windows]
        return Calibrator(
            self._checkpoint.config, embedded, self._calibration, bits=flavour.calibrated_bits
        )

    def _panels(self, root: Path, manifest: Manifest) -> Manifest:
        folder = root / PANELS
        folder.mkdir()
        report = ImportReport()
        with WeightFile(folder) as file:
            arrays = store_panels(
                self._checkpoint,
                file,
                report,
                on_layer=lambda i: self._steps.step(f"{PANELS}: layer {i}"),
            )
        entry = FlavourEntry(
            FLAVOURS[PANELS].description, None, (), False, report.to_json(), arrays=arrays
        )
        return replace(manifest, flavours={**manifest.flavours, PANELS: entry})


def _export_head(checkpoint: Checkpoint, root: Path, kind: str) -> HeadEntry:
    config = checkpoint.config
    folder = root / f"head-{kind}"
    folder.mkdir()
    with WeightFile(folder) as file:
        head = store_table(checkpoint, file, "embedding", kind)
        if not config.tied_embedding:
            head = store_table(checkpoint, file, "head", kind)
        ir.save(author_head(head, config), folder / HEAD_FILE)
        if kind == "f32":
            return HeadEntry({"values": file.arrays["embedding"]})
        return HeadEntry(
            {"codes": file.arrays["embedding"], "scale": file.arrays["embedding.scale"]}
        )


def store_table(checkpoint: Checkpoint, file: WeightFile, name: str, kind: str) -> Linear:
    """Store the embedding or the head as float32 or as int8 groups (exact from Q8_0)."""
    tensor = checkpoint.tensor(name)
    if kind == "f32":
        return FloatLinear.store(file, name, tensor.float32())
    codes, scale = (tensor.int8_groups or (lambda: quantize_groups(tensor.float32())))()
    return Int8GroupLinear.store(file, name, codes, scale)


def check_flavours(flavours: Collection[str]) -> None:
    """Refuse names that no flavour has, and none at all."""
    unknown = sorted(set(flavours) - set(FLAVOURS))
    if unknown or not flavours:
        raise OptionError(
            f"flavours {', '.join(unknown) or 'none'}: allowed are {', '.join(FLAVOURS)}"
        )


def _present(out: Path, *, force: bool) -> Manifest | None:
    """The manifest of the bundle at `out`; None where there is none or it is to be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not bundles.is_bundle(out):
        raise BundleError(f"{out}: exists and is not a bundle; choose another folder")
    return None if force else bundles.open_bundle(out).manifest


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except EdgeLLMError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ExportError(
                f"{out}: the disk is full ({error.strerror}); free some space and try again"
            ) from None
        raise ExportError(f"{out}: {error.strerror or error}") from None


def _sizes_of(present: Manifest | None) -> Sequence[int]:
    entries = present.flavours.values() if present is not None else ()
    return next((entry.chunk_sizes for entry in entries if entry.any_size), ())


def _weight_files(checkpoint: Checkpoint) -> list[Path]:
    path = checkpoint.path
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _digest(files: Sequence[Path]) -> str:
    """SHA-256 of the files' own, which names a model whatever was exported of it."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _version(tool: str) -> str:
    try:
        return importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
