"""A model on disk, whatever its file format: a config and tensors under canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError, ModelFormatError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.tensors import model_tensors


class Checkpoint(Protocol):
    """What the exporter reads.

    Attributes:
        path: the file or folder.
        metadata: GGUF's key-value pairs; empty for other formats.
    """

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a canonical name (see `tensors.py`)."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a Hugging Face folder.

    Raises:
        ModelFormatError: nothing there, damaged, or tensors that do not fit the config.
        UnsupportedModelError: an architecture or a feature that is not known.
    """
    from edgellm.graphs.gguf_checkpoint import GGUFCheckpoint
    from edgellm.graphs.safetensors_checkpoint import SafetensorsCheckpoint

    if not path.exists():
        raise ModelFormatError(f"{path}: no such file or folder")
    try:
        checkpoint = SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)
        check_shapes(checkpoint)
    except EdgeLLMError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None
    return checkpoint


def qkv_bias(checkpoint: Checkpoint, layer: int) -> NDArray[np.float32] | None:
    """What a layer adds to Q, K and V, `[H*D + 2 Hkv*D]`, if anything."""
    if not checkpoint.config.layers[layer].attention.qkv_bias:
        return None
    parts = (checkpoint.tensor(f"layers.{layer}.{name}_bias") for name in "qkv")
    return np.concatenate([part.float32() for part in parts])


def check_shapes(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors do not match its config, before any is read."""
    for name, spec in model_tensors(checkpoint.config).items():
        shape = checkpoint.tensor(name).shape
        if shape != spec.shape:
            raise ModelFormatError(
                f"{checkpoint.path}: tensor {name} has shape {list(shape)}, but the config "
                f"asks for {list(spec.shape)}"
            )
