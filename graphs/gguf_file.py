"""A memory-mapped GGUF file: metadata, and the bytes of each tensor."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError, UnsupportedModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Type of a metadata value -> numpy's dtype.
_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
# Vocabularies have up to 262,144 tokens and twice as many merges.
_MAX_ARRAY = 1 << 24
# Limit of ggml.
_MAX_DIMENSIONS = 4
# Name, number of dimensions, one dimension, type and offset.
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_SMALLEST_VALUE = 8 + 4 + 1
_LENGTH = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorEntry:
    """Entry of one tensor in a header.

    Attributes:
        shape: shape with rows first; the file has columns first.
        kind: ggml's number of the storage type.
        offset: first byte of the tensor, from the header's `data_offset`.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """Complete header of a GGUF file; the tensors may still be cut off.

    Attributes:
        data_offset: first byte of the tensors, from the start of the file.
        alignment: bytes; every tensor begins at a multiple of it.
    """

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    data_offset: int
    alignment: int


def read_header(data: mmap.mmap, *, origin: str) -> Header:
    """Read the header that begins after the magic number.

    Args:
        origin: name of the file in errors.

    Raises:
        ModelFormatError: the file is damaged or truncated.
        UnsupportedModelError: the version is not supported, or the header has huge or nested
            arrays, as no model has.
    """
    return _Walk(data, origin).header()


# Every length is compared with the rest of the file before anything of that length is read (layout:
# ggml/docs/gguf.md). The reader of the `gguf` package trusts every length, and makes array objects
# of each string, which takes many seconds.
class _Walk:
    """Reader of a header, with its position in the file."""

    def __init__(self, data: mmap.mmap, origin: str) -> None:
        self._data = data
        self._size = len(data)
        self._origin = origin
        self._at = len(MAGIC)

    def header(self) -> Header:
        version = self._number("<I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self._origin}: GGUF version {version} (or big-endian) is not supported; "
                f"supported are {' and '.join(map(str, _VERSIONS))}"
            )
        tensors, values = self._number("<Q"), self._number("<Q")
        self._need(values, _SMALLEST_VALUE, f"{values} metadata values")
        metadata: dict[str, Any] = {}
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(values):
            key, kind = self._string("the name of a metadata value"), self._number("<I")
            if key in metadata:
                raise self._damaged(f"metadata value {key} occurs twice")
            metadata[key] = self._value(key, kind)
            if key == "general.alignment":
                alignment = self._alignment(metadata[key], kind)
        self._need(tensors, _SMALLEST_TENSOR, f"{tensors} tensors")
        entries = tuple(self._tensor() for _ in range(tensors))
        data_offset = -(-self._at // alignment) * alignment
        return Header(metadata, entries, data_offset, alignment)

    def _alignment(self, value: Any, kind: int) -> int:
        if kind != _UINT32 or value < 1 or value & (value - 1):
            raise self._damaged(
                f"general.alignment is {value!r}; a power of two stored as uint32 is allowed"
            )
        return int(value)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1, key)[0]

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("<I"), self._number("<Q")
        what = f"{key}, a list of {count} values"
        if kind == _ARRAY:
            raise UnsupportedModelError(f"{self._origin}: {key} is a list of lists")
        self._need(count, 8 if kind == _STRING else self._dtype(key, kind).itemsize, what)
        if count > _MAX_ARRAY:
            raise UnsupportedModelError(
                f"{self._origin}: {what}: up to {_MAX_ARRAY} values are supported"
            )
        if kind == _STRING:
            return [self._string(what) for _ in range(count)]
        return self._numbers(key, kind, count, what)

    def _numbers(self, key: str, kind: int, count: int, what: str) -> list[Any]:
        dtype = self._dtype(key, kind)
        start = self._skip(count, dtype.itemsize, what)
        # a view would keep the memory map open, so this is a copy
        values = np.frombuffer(self._data[start : self._at], dtype)
        return [value != 0 for value in values.tolist()] if kind == _BOOL else values.tolist()

    def _dtype(self, key: str, kind: int) -> np.dtype[Any]:
        if kind not in _DTYPES:
            raise self._damaged(f"{key} has the unknown type {kind}")
        return np.dtype(_DTYPES[kind])

    def _tensor(self) -> TensorEntry:
        name = self._string("the name of a tensor")
        dimensions = self._number("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise self._damaged(
                f"tensor {name} has {dimensions} dimensions; 0 to {_MAX_DIMENSIONS} are allowed"
            )
        shape = tuple(reversed([self._number("<Q") for _ in range(dimensions)]))
        return TensorEntry(name, shape, self._number("<I"), self._number("<Q"))

    def _string(self, what: str) -> str:
        # called for each token and merge of a vocabulary, so _need's checks are written out
        start = self._at + 8
        if start > self._size:
            self._need(1, 8, what)
        (length,) = _LENGTH.unpack_from(self._data, self._at)
        self._at = start
        if length > self._size - start:
            self._need(length, 1, what)
        self._at += length
        try:
            return str(self._data[start : self._at], "utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8 ({error.reason})") from None

    def _number(self, format: str) -> int:
        start = self._skip(1, struct.calcsize(format), "a number")
        (number,) = struct.unpack_from(format, self._data, start)
        return int(number)

    def _skip(self, count: int, size: int, what: str) -> int:
        """Skip `count` values, and return the position where they begin."""
        self._need(count, size, what)
        start = self._at
        self._at += count * size
        return start

    def _need(self, count: int, size: int, what: str) -> None:
        left = self._size - self._at
        if count * size > left:
            raise ModelFormatError(
                f"{self._origin}: damaged or truncated GGUF file: {what} takes {count * size} "
                f"bytes, and {left} are left; download it again"
            )

    def _damaged(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self._origin}: damaged GGUF file: {what}; download it again")


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
