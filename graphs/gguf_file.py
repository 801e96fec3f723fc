"""A memory-mapped GGUF file: metadata, and the bytes of each tensor."""

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

# Tensor types with one number per element; all other types are stored in blocks of bytes.
_PLAIN = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}
# Tensor types of present and past ggml (ggml.h) that the gguf package may not know.
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
# File names of llama-gguf-split; parts are counted from 1.
_PART = re.compile(r"^(?P<name>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a GGUF file, in its stored form.

    Attributes:
        shape: shape in elements, rows first.
        tensor_type: storage type, a `gguf.GGMLQuantizationType`.
        offset: first byte of the tensor, from the start of the file.
        size: size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    offset: int
    size: int
    _file: NDArray[np.uint8] = field(repr=False, compare=False)

    @property
    def data(self) -> NDArray[Any]:
        """Elements in the tensor's shape; of types stored in blocks, `[..., bytes of a row]`."""
        stored = self._file[self.offset : self.offset + self.size]
        if plain := _PLAIN.get(self.tensor_type.name):
            # tensors of a file may be aligned to fewer bytes than numpy needs
            return np.require(stored.view(plain), requirements="A").reshape(self.shape)
        rows = math.prod(self.shape[:-1])
        return stored.reshape(*self.shape[:-1], self.size // rows if rows else 0)


class GGUFFile:
    """Memory-mapped GGUF file whose header is valid and whose tensors lie within the file.

    A model may be split into several files: then all parts are mapped, whichever is named. The
    metadata is that of the first part.

    Raises:
        ModelFormatError: the file is of another kind, damaged or truncated, or parts are missing or
            belong to another model.
        UnsupportedModelError: a part of a split model has another name than llama.cpp gives it, or
            a tensor type is not known.
    """

    def __init__(self, path: Path) -> None:
        self.metadata: Mapping[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        parts = parts_of(path)
        for number, part in enumerate(parts):
            if not part.exists():
                raise ModelFormatError(
                    f"{path}: part {number + 1} of {len(parts)} is missing: {part.name} must lie "
                    "beside it"
                )
            metadata = self._add(part)
            _check_part(part, metadata, number, len(parts))
            if number == 0:
                self.metadata = metadata
        total = self.metadata.get("split.tensors.count")
        if len(parts) > 1 and isinstance(total, int) and total != len(self.tensors):
            raise ModelFormatError(
                f"{path}: its parts hold {len(self.tensors)} tensors, and the first says {total}; "
                "download them again"
            )

    def _add(self, path: Path) -> Mapping[str, Any]:
        data = _mapped(path)
        header = read_header(data, origin=str(path))
        bytes_of_file = np.frombuffer(data, np.uint8)
        for entry in header.tensors:
            if entry.name in self.tensors:
                raise ModelFormatError(
                    f"{path}: damaged GGUF file: tensor {entry.name} occurs twice; download it "
                    "again"
                )
            self.tensors[entry.name] = _stored(entry, header, bytes_of_file, str(path))
        return header.metadata


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all files of a model by the name of one; the files may be missing."""
    named = _PART.match(path.name)
    if named is None or int(named["count"]) < 2:
        return [path]
    count = int(named["count"])
    return [
        path.with_name(f"{named['name']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


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
    """Return a tensor, after checks of its type and that its bytes lie within the file."""
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
    """Return a tensor's storage type, and the numbers of values and of bytes in a block."""
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


def _check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Refuse a file whose metadata and name disagree about which part of a model it is.

    Args:
        number: index of the part by the file's name, from 0.
        count: number of parts by the file's name.
    """
    said = metadata.get("split.count", count)
    if not isinstance(said, int) or max(said, 1) == count:
        if count > 1 and metadata.get("split.no", number) != number:
            raise ModelFormatError(
                f"{path}: its name says part {number + 1} of {count}, and the file says part "
                f"{metadata['split.no']!r}, counted from 0; download it again"
            )
        return
    if count > 1:
        raise ModelFormatError(
            f"{path}: its name says {count} parts, and the file {said}; download it again"
        )
    raise UnsupportedModelError(
        f"{path}: one of {said} parts of a split model; name them as llama.cpp does, "
        f"NAME-00001-of-{said:05d}.gguf, or put them together with "
        "`llama-gguf-split --merge FIRST_PART.gguf MODEL.gguf`"
    )
