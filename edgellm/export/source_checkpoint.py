"""Access to the checkpoint that a bundle was made of, to compare the two."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from edgellm.errors import SourceError
from edgellm.graphs.checkpoint import Checkpoint, open_checkpoint
from edgellm.graphs.gguf_file import parts_of
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.sources import resolve


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
