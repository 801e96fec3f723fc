"""A look at a GGUF file's header before the `gguf` package parses it.

That package believes every length and reads on past the end of the file, where it gets empty
arrays and no error: an array that claims 2^63 numbers keeps it busy for ever. Here the header is
walked once, and every length compared with what is left of the file (layout: ggml/docs/gguf.md).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm.errors import ModelFormatError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Value type -> its size; 8 is a string and 9 an array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
# The gguf package makes an object of each element. Vocabularies have up to 262,144 tokens and twice
# as many merges.
_MAX_ARRAY = 1 << 24
# Name, number of dimensions, one dimension, type and offset.
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_SMALLEST_VALUE = 8 + 4 + 1
# As llama-gguf-split names its files.
_PART = re.compile(r"-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


def check_header(path: Path) -> None:
    """Refuse a file whose header does not fit into it.

    Raises:
        ModelFormatError: another kind of file, or a damaged or truncated one.
        UnsupportedModelError: a header that is in order but of no model: huge or nested arrays.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        magic = file.read(4)
        if magic != _MAGIC:
            raise ModelFormatError(
                f"{path}: not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data, str(path)).header()


class _Walk:
    """A position in a header."""

    def __init__(self, data: mmap.mmap, origin: str) -> None:
        self._data = data
        self._origin = origin
        self._at = len(_MAGIC)

    def header(self) -> None:
        version = self._number("<I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self._origin}: GGUF version {version} (or big-endian) is not supported; "
                f"supported are {' and '.join(map(str, _VERSIONS))}"
            )
        tensors, values = self._number("<Q"), self._number("<Q")
        self._need(values, _SMALLEST_VALUE, f"{values} metadata values")
        for _ in range(values):
            key = self._string("the name of a metadata value")
            self._value(key, self._number("<I"))
        self._need(tensors, _SMALLEST_TENSOR, f"{tensors} tensors")

    def _value(self, key: str, kind: int) -> None:
        if kind == _STRING:
            self._string(key)
        elif kind == _ARRAY:
            self._array(key)
        else:
            self._skip(1, self._size(key, kind), key)

    def _array(self, key: str) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        what = f"{key}, a list of {count} values"
        if kind == _ARRAY:
            raise UnsupportedModelError(f"{self._origin}: {key} is a list of lists")
        self._need(count, 8 if kind == _STRING else self._size(key, kind), what)
        if count > _MAX_ARRAY:
            raise UnsupportedModelError(
                f"{self._origin}: {what}: up to {_MAX_ARRAY} values are supported"
            )
        if kind == _STRING:
            for _ in range(count):
                self._string(what)
        else:
            self._skip(count, self._size(key, kind), what)

    def _size(self, key: str, kind: int) -> int:
        if kind not in _SIZES:
            raise ModelFormatError(
                f"{self._origin}: damaged GGUF file: {key} has the unknown type {kind}; download "
                "it again"
            )
        return _SIZES[kind]

    def _string(self, what: str) -> str:
        length = self._number("<Q")
        start = self._at
        self._skip(length, 1, what)
        return self._data[start : start + min(length, 80)].decode("utf-8", "replace")

    def _number(self, format: str) -> int:
        size = struct.calcsize(format)
        self._need(1, size, "a number")
        (value,) = struct.unpack_from(format, self._data, self._at)
        self._at += size
        number: int = value
        return number

    def _skip(self, count: int, size: int, what: str) -> None:
        self._need(count, size, what)
        self._at += count * size

    def _need(self, count: int, size: int, what: str) -> None:
        left = len(self._data) - self._at
        if count * size > left:
            raise ModelFormatError(
                f"{self._origin}: damaged or truncated GGUF file: {what} takes {count * size} "
                f"bytes, and {left} are left; download it again"
            )


def check_whole(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse one part of a model that was split into several files.

    Raises:
        UnsupportedModelError: says which part it is, and how the parts become one file.
    """
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
