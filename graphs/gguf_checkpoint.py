"""A GGUF file, parsed and dequantized by the `gguf` package.

Quantized tensors are taken over code by code where one of our kinds holds their type exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import Tensor, architecture, checked, file_name
from edgellm.graphs.config import Fields
from edgellm.graphs.gguf_blocks import FORMATS, weight_of
from edgellm.graphs.gguf_header import check_header, check_whole


class GGUFCheckpoint:
    """A memory-mapped GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self._tensors = _read(path)
        check_whole(path, self.metadata)
        fields = Fields(self.metadata, origin=str(path))
        kind = fields.optional(str, "general.type")
        if kind not in (None, "model"):
            raise UnsupportedModelError(f"{path}: a GGUF file of type {kind!r} is not a model")
        model_type = fields.read(str, "general.architecture")
        model = architecture(model_type, origin=str(path))
        if not hasattr(model, "config_from_gguf"):
            raise UnsupportedModelError(f"{path}: {model_type} is not supported in GGUF files")
        self._templates: Mapping[str, str] = model.GGUF_TENSORS
        self._interleaved: bool = model.GGUF_INTERLEAVED_ROPE
        factors = self._tensors.get("rope_freqs.weight")
        self.config = model.config_from_gguf(
            self.metadata,
            vocab_size=self.tensor("embedding").shape[0],
            tied_embedding=self._templates["head"] not in self._tensors,
            rope_factors=None if factors is None else factors.data.tolist(),
            origin=str(path),
        )

    def tensor(self, name: str) -> Tensor:
        key = file_name(name, self._templates)
        if key not in self._tensors:
            raise ModelFormatError(f"{self.path}: tensor {key} is missing")
        entry = self._tensors[key]
        shape = tuple(int(n) for n in reversed(entry.shape))
        storage = entry.tensor_type.name
        rows: NDArray[np.intp] | slice = slice(None)
        if self._interleaved and name.endswith((".q", ".k")):
            heads = self.config.heads if name.endswith(".q") else self.config.kv_heads
            rows = _half_split_order(shape[0], heads)
        tensor = Tensor(
            shape,
            storage,
            float32=lambda: _dequantize(entry, str(self.path))[rows],
            quantized=(lambda: weight_of(entry.data[rows], storage))
            if storage in FORMATS
            else None,
        )
        return checked(tensor, f"{self.path}: tensor {key}")


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Metadata and tensors by name; whatever is wrong with the file is a ModelFormatError."""
    import gguf

    try:
        check_header(path)
        # a flipped size makes the reader's numpy arithmetic wrap around before it fails
        with np.errstate(over="ignore"):
            reader = gguf.GGUFReader(path)
            metadata = {key: field.contents() for key, field in reader.fields.items()}
    except EdgeLLMError:
        raise
    except OSError as error:
        raise ModelFormatError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # the reader raises whatever numpy raises on a broken file
        raise ModelFormatError(
            f"{path}: damaged or truncated GGUF file ({type(error).__name__}: {error}); "
            "download it again"
        ) from None
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _half_split_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Row order that undoes the converter's permutation of q and k, head by head."""
    if rows % (2 * heads):
        raise ModelFormatError(
            f"{rows} rows of a q or k projection do not split into {heads} heads"
        )
    order: NDArray[np.intp] = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return order.transpose(0, 2, 1).reshape(-1)


def _dequantize(entry: Any, origin: str) -> NDArray[np.float32]:
    import gguf

    try:
        # a damaged scale is infinite; `checked` refuses what comes of it
        with np.errstate(invalid="ignore", over="ignore"):
            values = gguf.dequantize(entry.data, entry.tensor_type)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{origin}: tensor {entry.name} is stored as {entry.tensor_type.name}, which the gguf "
            "package cannot dequantize"
        ) from None
    return np.asarray(values, np.float32)
