"""The exporter's side of the native kernels' weights (see `panels.py`)."""

from __future__ import annotations

from collections.abc import Callable

from edgellm.backends.panels import LINEAR
from edgellm.export.weight_reader import WeightReader
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import qkv_bias
from edgellm.kernels.linear import to_panels
from edgellm.kernels.quantized import QuantizedWeight


def store_panels(
    reader: WeightReader, file: WeightFile, *, on_layer: Callable[[int], None]
) -> dict[str, str]:
    """Write all weights, in the order in which a token needs them; gives the kind of each."""
    checkpoint = reader.checkpoint
    config = checkpoint.config
    kinds, read = {}, []

    def add(name: str, weight: QuantizedWeight) -> None:
        kinds[name] = weight.kind.name
        panels = to_panels(weight)
        file.add(name, panels.data)
        if name == "embedding" and not config.tied_embedding:
            return  # of which a token needs a row
        read.append((checkpoint.tensor(name).nbytes, panels.data.nbytes))

    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        for norm in ("attention_norm", "mlp_norm"):
            file.add(prefix + norm, checkpoint.tensor(prefix + norm).float32())
        for name in LINEAR:
            add(prefix + name, reader.linear(prefix + name))
        bias = qkv_bias(checkpoint, layer)
        if bias is not None:
            file.add(f"{prefix}qkv_bias", bias)
        on_layer(layer)
    file.add("final_norm", checkpoint.tensor("final_norm").float32())
    for name in ("embedding",) if config.tied_embedding else ("embedding", "head"):
        add(name, reader.table(name))
    reader.report.decode_bytes = sum(nbytes for _, nbytes in read)
    if all(in_file for in_file, _ in read):
        reader.report.file_bytes = sum(in_file for in_file, _ in read)
    return kinds
