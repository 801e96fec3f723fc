"""Adapters (LoRA, arXiv:2106.09685) on disk, in the formats of PEFT, llama.cpp and MLX."""

from __future__ import annotations

from pathlib import Path

from edgellm.errors import EdgeLLMError, ModelFormatError
from edgellm.graphs.lora.formats import (
    CONFIG,
    MLX_WEIGHTS,
    PEFT_WEIGHTS,
    read_gguf,
    read_mlx,
    read_peft,
)
from edgellm.graphs.lora.stored import StoredAdapter, changes_of, pack_changes

__all__ = ["StoredAdapter", "changes_of", "open_adapter", "pack_changes"]


def open_adapter(path: Path) -> StoredAdapter:
    """Open an adapter: PEFT's or MLX's folder, or a GGUF file.

    Raises:
        ModelFormatError: nothing is there, or it is damaged, or no adapter.
        UnsupportedModelError: the adapter changes more than linear layers by matrices of low rank.
    """
    folder = path.parent if path.name in (PEFT_WEIGHTS, MLX_WEIGHTS) else path
    try:
        if path.suffix == ".gguf" and not path.is_dir():
            return read_gguf(path)
        if not folder.is_dir():
            raise ModelFormatError(
                "not an adapter: neither a folder nor a .gguf file is there; a folder of PEFT has "
                f"{PEFT_WEIGHTS}, one of MLX {MLX_WEIGHTS}"
            )
        if (folder / MLX_WEIGHTS).exists():
            return read_mlx(folder)
        if not (folder / CONFIG).exists():  # a client that names a folder is not told more
            raise ModelFormatError(f"not an adapter: {CONFIG} is missing")
        return read_peft(folder)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from None
    except EdgeLLMError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None
