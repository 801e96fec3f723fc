"""Checkpoint with adapters merged into its weights, for back ends that take no adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.lora import changes_of, open_adapter
from edgellm.graphs.tensor import Tensor
from edgellm.kernels.lora import LowRank, pack_adapter

# Path of an adapter, and a factor of its changes.
Merge = tuple[Path, float]


class MergedCheckpoint:
    """A checkpoint whose changed matrices are the sums of weights and changes, in float32.

    Attributes:
        digest: digest of all changes.
    """

    def __init__(self, checkpoint: Checkpoint, adapters: Sequence[Merge]) -> None:
        """Read the adapters.

        Raises:
            ModelFormatError, UnsupportedModelError: see `open_adapter` and `changes_of`.
        """
        self.path: Path = checkpoint.path
        self.config: ModelConfig = checkpoint.config
        self.metadata: Mapping[str, Any] = checkpoint.metadata
        self.mtp: Checkpoint | None = checkpoint.mtp
        self._checkpoint = checkpoint
        self._changes: dict[str, list[LowRank]] = {}
        digest = hashlib.sha256()
        for path, scale in adapters:
            stored = open_adapter(path)
            if stored.invocation:
                raise UnsupportedModelError(
                    f"{path}: an adapter that begins at tokens of the prompt cannot be merged into "
                    "the weights; load it with the model (`adapters`)"
                )
            layers = [
                {name: replace(c, b=np.float32(scale) * c.b) for name, c in changes.items()}
                for changes in changes_of(stored, self.config)
            ]
            digest.update(pack_adapter(layers).digest.encode())
            for index, changes in enumerate(layers):
                for name, change in changes.items():
                    self._changes.setdefault(f"layers.{index}.{name}", []).append(change)
        self.digest = digest.hexdigest()

    def tensor(self, name: str) -> Tensor:
        """Read a tensor of the checkpoint, with its changes; a changed one has no codes."""
        tensor, changes = self._checkpoint.tensor(name), self._changes.get(name, [])
        if not changes:
            return tensor

        def float32() -> NDArray[np.float32]:
            values = tensor.float32().copy()
            for change in changes:
                values += change.b @ change.a
            return values

        return replace(tensor, storage="F32", float32=float32, quantized=None)
