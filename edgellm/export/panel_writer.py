"""The exporter's side of the native kernels' weights (see `panels.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from edgellm.export.flavours import int4_weight, int8_table
from edgellm.export.import_report import ImportReport
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint, qkv_bias
from edgellm.graphs.contract import StoredArray
from edgellm.kernels.int4 import concatenate
from edgellm.kernels.linear import int4_panels, int8_panels
from edgellm.panels import LINEAR
from edgellm.quantize.int8 import ZERO_POINT


def store_panels(
    checkpoint: Checkpoint,
    file: WeightFile,
    report: ImportReport,
    *,
    on_layer: Callable[[int], None],
) -> Mapping[str, StoredArray]:
    """Write all weights, in the order in which a token needs them."""
    config = checkpoint.config
    for layer in range(config.layers):
        for norm in ("attention_norm", "mlp_norm"):
            name = f"layers.{layer}.{norm}"
            file.add(name, checkpoint.tensor(name).float32())
        for name, parts in LINEAR.items():
            weights = [int4_weight(checkpoint, f"layers.{layer}.{p}", report) for p in parts]
            file.add(f"layers.{layer}.{name}", int4_panels(concatenate(weights)).data)
        bias = qkv_bias(checkpoint, layer)
        if bias is not None:
            file.add(f"layers.{layer}.qkv_bias", bias)
        on_layer(layer)
    file.add("final_norm", checkpoint.tensor("final_norm").float32())
    for name in ("embedding",) if config.tied_embedding else ("embedding", "head"):
        file.add(name, _table(checkpoint, name, report))
    return dict(file.arrays)


def _table(checkpoint: Checkpoint, name: str, report: ImportReport) -> NDArray[np.uint8]:
    """The embedding or the head as int8 panels (exact from Q8_0)."""
    codes, scale = int8_table(checkpoint, name, report)
    signed = (codes ^ np.uint8(ZERO_POINT)).view(np.int8)
    return int8_panels(signed.reshape(signed.shape[0], -1), scale).data
