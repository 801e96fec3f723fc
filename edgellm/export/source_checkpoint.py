"""The checkpoint that a bundle is made of: as it is, for comparisons, or with adapters merged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import SourceError, UnsupportedModelError
from edgellm.graphs.checkpoint import Checkpoint, open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.gguf_file import parts_of
from edgellm.graphs.lora import changes_of, open_adapter, pack_changes
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.graphs.tensor import Tensor
from edgellm.kernels.lora import LowRank
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.sources import resolve

# Path of an adapter, and a factor of its changes.
Merge = tuple[Path, float]


def open_source(bundle: Bundle, *, progress: ProgressCallback | None = None) -> Checkpoint:
    """Open the checkpoint that the bundle's manifest names, downloading it if need be and possible.

    Args:
        progress: called during a download, see `Progress`.

    Raises:
        SourceError: the checkpoint is gone, or has other weights now.
        ModelFormatError, UnsupportedModelError: see `open_checkpoint`.
    """
    manifest = bundle.manifest
    try:
        path = resolve(manifest.source, progress=progress).path
    except SourceError as error:
        raise SourceError(
            f"{bundle.path}: the weights it was made of are needed here, and {error}; put the file "
            "back, or name a model file instead of this bundle"
        ) from None
    checkpoint = open_checkpoint(path)
    if manifest.source_sha256 and digest_of(weight_files(checkpoint)) != manifest.source_sha256:
        raise SourceError(
            f"{bundle.path}: {path} holds other weights now than when the bundle was made of it; "
            "name the model file, and a bundle of what it holds is made"
        )
    return checkpoint


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that hold a checkpoint's weights."""
    path = checkpoint.path
    return SafetensorsFolder(path).files if path.is_dir() else parts_of(path)


def file_type_of(checkpoint: Checkpoint) -> str:
    """Return the quantization that a GGUF file names for itself, e.g. Q4_K_M; "" if none."""
    number = checkpoint.metadata.get("general.file_type")
    if number is None:
        return ""
    from gguf import LlamaFileType  # 0.1 s

    try:
        name: str = LlamaFileType(number).name
    except ValueError:  # a newer one
        return ""
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def digest_of(files: Sequence[Path]) -> str:
    """Return the SHA-256 over the files' SHA-256s, which identifies a model's checkpoint."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


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
            digest.update(pack_changes(layers).digest.encode())
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
                values += (change.b @ change.a).reshape(values.shape)  # of heads one by one
            return values

        return replace(tensor, storage="F32", float32=float32, quantized=None)
