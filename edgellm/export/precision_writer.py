"""Writer of a bundle's weights and graphs: a precision's segments, an LM head, packed weights."""

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
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import HEAD_FILE, HOST_TOKENS, part_file, parts
from edgellm.graphs.linear import FloatLinear, GroupLinear, Linear
from edgellm.graphs.mtp import mtp_tensors
from edgellm.graphs.segment import Segment, author_head, author_segment
from edgellm.graphs.tensors import TensorSpec, layer_tensors, model_tensors
from edgellm.kernels.linear import pack_weight
from edgellm.kernels.quantized import QuantizedWeight
from edgellm.store.key_basis import is_head_norm
from edgellm.store.manifest import HeadEntry, MtpEntry, PrecisionEntry
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


def store_packed_weights(
    reader: WeightReader, file: WeightFile, *, on_layer: Callable[[int], None]
) -> dict[str, str]:
    """Write all packed weights in the order in which a token needs them.

    Norms of Q and K are not among them: the key basis holds them for all precisions (see
    `key_basis.py`).

    Args:
        on_layer: called with the number of each layer that is written.

    Returns:
        The quantized kind of each matrix by its name.
    """
    writer = _Writer(reader, file)
    config = reader.checkpoint.config
    for layer in range(config.layer_count):
        for spec in layer_tensors(config, layer):
            name = f"layers.{layer}.{spec.name}"
            if spec.role == "linear":
                writer.matrix(name, reader.linear(name), spec)
            elif spec.role == "router":
                writer.router(name)
            elif not is_head_norm(spec.name):
                writer.vector(name)
        on_layer(layer)
    for name, spec in model_tensors(config).items():
        if name.startswith("layers."):
            continue
        if spec.role == "vector":
            writer.vector(name)
        else:
            read = reader.linear if spec.role == "linear" else reader.table
            writer.matrix(name, read(name), spec)
    reader.report.decode_bytes = sum(nbytes for _, nbytes in writer.read)
    if all(in_file for in_file, _ in writer.read):
        reader.report.file_bytes = sum(in_file for in_file, _ in writer.read)
    return writer.kinds


def store_mtp_weights(reader: WeightReader, file: WeightFile, config: ModelConfig) -> MtpEntry:
    """Write the tensors of a model's head that predicts the token after the next.

    Args:
        reader: reader of the head, see `Checkpoint.mtp`.
        config: config of the model.
    """
    writer = _Writer(reader, file)
    for name, spec in mtp_tensors(config).items():
        if spec.role == "linear":
            writer.matrix(name, reader.linear(name), spec)
        else:
            writer.vector(name)
    return MtpEntry(dict(file.arrays), writer.kinds)


class _Writer:
    """Writer of single tensors.

    Attributes:
        kinds: quantized kind of each matrix written, by its name.
        read: bytes, in the file and packed, that a decode step reads of each matrix.
    """

    def __init__(self, reader: WeightReader, file: WeightFile) -> None:
        self._checkpoint = reader.checkpoint
        self._file = file
        self.kinds: dict[str, str] = {}
        self.read: list[tuple[int, int]] = []

    def vector(self, name: str) -> None:
        self._file.add(name, self._checkpoint.tensor(name).float32())

    def router(self, name: str) -> None:
        tensor = self._checkpoint.tensor(name)
        values = tensor.float32()
        self._file.add(name, values)
        self.read.append((tensor.nbytes, values.nbytes))

    def matrix(self, name: str, weight: QuantizedWeight, spec: TensorSpec) -> None:
        self.kinds[name] = weight.kind.name
        packed = pack_weight(weight)
        self._file.add(name, packed.data)
        untied = name == "embedding" and not self._checkpoint.config.tied_embedding
        if untied or spec.role == "rows":
            return  # a token reads a few rows of it
        sizes = self._checkpoint.tensor(name).nbytes, packed.data.nbytes
        self.read.append((spec.used(sizes[0]), spec.used(sizes[1])))
