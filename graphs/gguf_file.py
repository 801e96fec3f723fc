"""A GGUF file in memory: metadata, and the bytes of each tensor where the file has them."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.gguf_header import MAGIC, Header, TensorEntry, read_header

# Types that are one number per element; whatever else there is comes in blocks of bytes.
_PLAIN = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}
# Types that ggml has or had, and of which the gguf package may not know (ggml.h).
_NAMES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
# As llama-gguf-split names its files.
_PART = re.compile(r"-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the file has it.

    Attributes:
        shape: in elements, rows first.
        tensor_type: a `gguf.GGMLQuantizationType`.
        offset: in bytes from the start of the file.
        size: in bytes.
    """

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    offset: int
    size: int
    _file: NDArray[np.uint8] = field(repr=False, compare=False)

    @property
    def data(self) -> NDArray[Any]:
        """The shape's elements where the type is one number each, else `[..., bytes of a row]`."""
        stored = self._file[self.offset : self.offset + self.size]
        if plain := _PLAIN.get(self.tensor_type.name):
            # a file may ask for less alignment than numpy does
            return np.require(stored.view(plain), requirements="A").reshape(self.shape)
        rows = math.prod(self.shape[:-1])
        return stored.reshape(*self.shape[:-1], self.size // rows if rows else 0)


class GGUFFile:
    """A mapped GGUF file whose header is in order and whose tensors lie within it.

    Raises:
        ModelFormatError: another kind of file, or a damaged or truncated one.
        UnsupportedModelError: one part of a split model, or a tensor type that is not known.
    """

    def __init__(self, path: Path) -> None:
        data = _mapped(path)
        header = read_header(data, origin=str(path))
        _check_whole(path, header.metadata)
        self.metadata: Mapping[str, Any] = header.metadata
        bytes_of_file = np.frombuffer(data, np.uint8)
        self.tensors: dict[str, StoredTensor] = {}
        for entry in header.tensors:
            if entry.name in self.tensors:
                raise ModelFormatError(
                    f"{path}: damaged GGUF file: tensor {entry.name} occurs twice; download it "
                    "again"
                )
            self.tensors[entry.name] = _stored(entry, header, bytes_of_file, str(path))


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise ModelFormatError(
                    f"{path}: not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFormatError(f"{path}: {error.strerror or error}") from None


def _stored(
    entry: TensorEntry, header: Header, file: NDArray[np.uint8], origin: str
) -> StoredTensor:
    """The tensor, once its type is known and its bytes lie within the file."""
    kind, block, block_bytes = _type_of(entry, origin)

    def damaged(what: str) -> ModelFormatError:
        return ModelFormatError(
            f"{origin}: damaged or truncated GGUF file: tensor {entry.name} {what}; download it "
            "again"
        )

    columns = entry.shape[-1] if entry.shape else 1
    if columns % block:
        raise damaged(
            f"has rows of {columns} values, and {kind.name} is stored in blocks of {block}"
        )
    # an empty dimension hides how large the others are
    if math.prod(max(n, 1) for n in entry.shape) * block_bytes >= 1 << 63:
        raise damaged(f"has the impossible shape {list(entry.shape)}")
    if entry.offset % header.alignment:
        raise damaged(f"begins at {entry.offset}, which is no multiple of {header.alignment}")
    size = math.prod(entry.shape) // block * block_bytes
    offset = header.data_offset + entry.offset
    if offset + size > len(file):
        raise damaged(f"ends at byte {offset + size}, and the file has {len(file)}")
    return StoredTensor(entry.name, entry.shape, kind, offset, size, file)


def _type_of(entry: TensorEntry, origin: str) -> tuple[Any, int, int]:
    """The storage type, how many values are a block, and how many bytes a block takes."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(entry.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        name = f" ({_NAMES[entry.kind]})" if entry.kind in _NAMES else ""
        raise UnsupportedModelError(
            f"{origin}: tensor {entry.name} is stored as ggml type {entry.kind}{name}, which is "
            "not supported; take a file in another quantization, e.g. Q4_0 or Q8_0"
        ) from None
    return kind, block, block_bytes


def _check_whole(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse one part of a model that was split into several files, and say how to join them."""
    number, count = metadata.get("split.no"), metadata.get("split.count")
    named = _PART.search(path.name)
    if isinstance(count, int) and count > 1:
        part = number + 1 if isinstance(number, int) else "?"
    elif count is None and named is not None and int(named["count"]) > 1:
        part, count = int(named["part"]), int(named["count"])
    else:
        return
    raise UnsupportedModelError(
        f"{path}: part {part} of {count} of a split model; put the parts together with llama.cpp's "
        "`llama-gguf-split --merge FIRST_PART.gguf MODEL.gguf` and take MODEL.gguf"
    )
