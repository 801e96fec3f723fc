"""Header of a GGUF file: metadata, and name, shape, type and offset of each tensor.

The header is read once from start to end (layout: ggml/docs/gguf.md). Every length is compared with
the rest of the file before anything of that length is read. The `gguf` package has a reader too: it
trusts every length, and makes array objects of each string, which takes many seconds.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

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
