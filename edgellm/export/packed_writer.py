"""Writer of the native kernels' packed weights (see `packed_weights.py` for the reader)."""

from __future__ import annotations

from collections.abc import Callable

from edgellm.export.weight_reader import WeightReader
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.mtp import mtp_tensors
from edgellm.graphs.tensors import TensorSpec, layer_tensors, model_tensors
from edgellm.kernels.linear import pack_weight
from edgellm.kernels.quantized import QuantizedWeight
from edgellm.store.key_basis import is_head_norm
from edgellm.store.manifest import MtpEntry


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
