"""Writer of a bundle's folders with graphs: a precision's segments, and an LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir as ir

from edgellm.export.calibrate import CalibrationOptions, Calibrator, choose_windows
from edgellm.export.precisions import PRECISIONS, Precision
from edgellm.export.weight_reader import WeightReader
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.contract import HEAD_FILE, HOST_TOKENS, part_file, parts
from edgellm.graphs.linear import FloatLinear, GroupLinear, Linear
from edgellm.graphs.segment import Segment, author_head, author_segment
from edgellm.store.manifest import HeadEntry, PrecisionEntry
from edgellm.store.reference import ROTATION
from edgellm.text.tokenizer import Tokenizer


def write_precision(
    reader: WeightReader,
    name: str,
    root: Path,
    *,
    tokenizer: Tokenizer,
    chunk_sizes: Sequence[int],
    calibration: CalibrationOptions,
    on_segment: Callable[[int], None],
) -> PrecisionEntry:
    """Write a precision's folder in `root`, and return its entry for the manifest.

    Args:
        tokenizer: tokenizer for the calibration text.
        on_segment: called with the number of each segment whose weights are written.
    """
    precision = PRECISIONS[name]
    assert precision.segments is not None
    static = (1,) if precision.token_by_token else tuple(sorted(set(chunk_sizes)))
    checkpoint, segments = reader.checkpoint, []
    folder = root / name
    folder.mkdir()
    with (
        TemporaryDirectory(dir=root) as scratch,
        WeightFile(Path(scratch)) as unrounded,
        WeightFile(folder) as file,
    ):
        calibrator = _calibrator(checkpoint, precision, tokenizer, calibration, unrounded)
        for segment in precision.segments(reader, file, calibrator):
            segments.append(segment)
            on_segment(segment.index)
    shadows = calibrator.shadows() if calibrator else {}
    read_by_name = [*(n for s in shadows for n in (s, f"{s}.scale")), ROTATION]
    entry = PrecisionEntry(
        precision.description,
        precision.head,
        static,
        not precision.token_by_token,
        reader.report.to_json(),
        arrays={n: file.arrays[n] for n in read_by_name if n in file.arrays},
        host_tokens=HOST_TOKENS if calibrator else 0,
        calibration=calibration.to_json() if calibrator else {},
        shadows=shadows,
    )
    _write_graphs(checkpoint, precision, entry, segments, calibrator, folder)
    return entry


def _calibrator(
    checkpoint: Checkpoint,
    precision: Precision,
    tokenizer: Tokenizer,
    calibration: CalibrationOptions,
    unrounded: WeightFile,
) -> Calibrator | None:
    bits = precision.calibrated_bits
    if bits is None:
        return None
    windows = choose_windows(tokenizer, calibration)
    embedded = checkpoint.tensor("embedding").float32()[windows]
    return Calibrator(checkpoint, embedded, calibration, bits=bits, file=unrounded)


def _write_graphs(
    checkpoint: Checkpoint,
    precision: Precision,
    entry: PrecisionEntry,
    segments: Sequence[Segment],
    calibrator: Calibrator | None,
    folder: Path,
) -> None:
    """Write the graph of every part for every static chunk size, and for any size if asked for."""
    config, grids = checkpoint.config, calibrator.grids(entry.shadows) if calibrator else None
    for part in parts(config, entry.cut_segments):
        for chunk in (*entry.chunk_sizes, *([None] if entry.any_size else [])):
            model = author_segment(
                segments[part.index],
                config,
                chunk=chunk,
                half=part.half,
                grids=grids,
                basic_norms=precision.basic_norms and chunk is not None,
            )
            ir.save(model, folder / part_file(part, chunk))


def write_head(reader: WeightReader, root: Path, kind: str) -> HeadEntry:
    """Write the folder of an LM head and its embedding in `root`; returns the manifest's entry."""
    config = reader.checkpoint.config
    folder = root / f"head-{kind}"
    folder.mkdir()
    with WeightFile(folder) as file:
        head = _store_table(reader, file, "embedding", kind)
        if not config.tied_embedding:
            head = _store_table(reader, file, "head", kind)
        ir.save(author_head(head, config), folder / HEAD_FILE)
        names = {"values": ""} if kind == "f32" else {"codes": "", "scale": ".scale"}
        arrays = {name: file.arrays[f"embedding{end}"] for name, end in names.items()}
        return HeadEntry(arrays, reader.report.to_json())


def _store_table(reader: WeightReader, file: WeightFile, name: str, kind: str) -> Linear:
    """Store the embedding or the LM head as float32, or as unsigned bytes around 128."""
    if kind == "f32":
        tensor = reader.checkpoint.tensor(name)
        reader.report.took(name, tensor.storage, kind)
        return FloatLinear.store(file, name, tensor.float32())
    return GroupLinear.store(file, name, reader.symmetric_table(name), whole_bytes=True)
