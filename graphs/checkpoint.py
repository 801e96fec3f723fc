"""A model on disk, whatever its file format: a config and tensors under canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError, ModelFormatError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.gguf_file import parts_of
from edgellm.graphs.layer_config import Attention
from edgellm.graphs.mtp import mtp_tensors
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.tensors import TensorSpec, model_tensors

# Suffixes of the files that are read in a folder.
_READ = (".jinja", ".json", ".safetensors")


class Checkpoint(Protocol):
    """Model on disk, as the exporter reads it.

    Attributes:
        path: file or folder of the model.
        config: configuration of the model.
        metadata: key-value pairs of a GGUF file; empty for other formats.
        mtp: the model's head that predicts the token after the next, with the tensors of `mtp.py`;
            None: it has none.
    """

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any]

    @property
    def mtp(self) -> Checkpoint | None: ...

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a canonical name (see `tensors.py`)."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a Hugging Face folder.

    Raises:
        ModelFormatError: the path does not exist, a file is damaged, or tensors do not fit the
            config.
        UnsupportedModelError: the architecture or a feature is not supported.
    """
    from edgellm.graphs.gguf_checkpoint import GGUFCheckpoint
    from edgellm.graphs.safetensors_checkpoint import SafetensorsCheckpoint

    if not path.exists():
        raise ModelFormatError(f"{path}: no such file or folder")
    try:
        _refuse_pipes(path)
        if path.is_dir():
            folder = SafetensorsCheckpoint(path)
            check_shapes(folder)
            return folder
        file = GGUFCheckpoint(path)
        check_shapes(file)
        file.refuse_unread()
        return file
    except EdgeLLMError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None


def _refuse_pipes(path: Path) -> None:
    """Refuse pipes and devices, which a reader might wait for without an end.

    Args:
        path: file or folder of a model.
    """
    folder = path.is_dir()
    for file in path.iterdir() if folder else parts_of(path):
        read = not folder or file.suffix in _READ
        if read and file.exists() and not (file.is_file() or file.is_dir()):
            raise ModelFormatError(f"{file}: not a regular file")


def qkv_bias(checkpoint: Checkpoint, layer: int) -> NDArray[np.float32] | None:
    """Return a layer's biases of Q, K and V, and zeros for what is behind; None if it has none."""
    mixer = checkpoint.config.layers[layer].mixer
    if not isinstance(mixer, Attention) or not mixer.qkv_bias:
        return None
    parts = [checkpoint.tensor(f"layers.{layer}.{name}_bias").float32() for name in "qkv"]
    rest = checkpoint.config.layers[layer].inputs - mixer.qkv_size
    return np.concatenate([*parts, np.zeros(rest, np.float32)])


def check_shapes(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors' shapes do not match its config, before values are read."""
    _check_shapes(checkpoint, model_tensors(checkpoint.config))
    if checkpoint.mtp is not None:
        _check_shapes(checkpoint.mtp, mtp_tensors(checkpoint.config))


def _check_shapes(checkpoint: Checkpoint, specs: Mapping[str, TensorSpec]) -> None:
    for name, spec in specs.items():
        shape = checkpoint.tensor(name).shape
        if shape != spec.shape:
            raise ModelFormatError(
                f"{checkpoint.path}: tensor {name} has shape {list(shape)}, but the config "
                f"asks for {list(spec.shape)}"
            )
