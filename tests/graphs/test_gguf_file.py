"""GGUF headers byte by byte: damaged ones, unusual ones, and real ones beside the gguf package."""

from __future__ import annotations

import gc
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgellm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.gguf_file import GGUFFile


def header(*values: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    count = len(values) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + b"".join(values)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text("a.list") + struct.pack("<IIQ", 9, kind, count) + content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(array(4, 1 << 63)), r"a\.list, a list of 9223372036854775808 values"),
        (header(array(0, 1 << 62)), r"a\.list, a list of 4611686018427387904 values"),
        (header(array(8, 1 << 62)), r"a\.list, a list of"),
        (header(array(0, 101, bytes(100))), "takes 101 bytes, and 100 are left"),
        (header(array(8, 2, text("x") + struct.pack("<Q", 1 << 63))), r"a\.list"),
        (header(array(0, (1 << 24) + 1, bytes((1 << 24) + 1))), "up to 16777216"),
        (header(array(9, 1, array(9, 1 << 40))), "list of lists"),
        (header(array(77, 1, bytes(100))), "unknown type 77"),
        (header(text("a") + struct.pack("<I", 13) + bytes(100)), "unknown type 13"),
        (header(struct.pack("<Q", (1 << 64) - 1) + bytes(100)), "name of a metadata value"),
        (header(count=1 << 60), "1152921504606846976 metadata values"),
        (header(tensors=1 << 60), "1152921504606846976 tensors"),
        (header(version=1), "version 1"),
        (header(version=0x03000000), "big-endian"),
        (b"GGUF", "a number"),
    ],
)
def test_lengths_beyond_the_file_are_refused_at_once(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(EdgeLLMError, match=words) as refused:
        open_checkpoint(path)
    assert "model.gguf" in str(refused.value)


def tensor_of(
    name: str | bytes = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    name = name.encode() if isinstance(name, str) else name
    return (
        struct.pack("<Q", len(name))
        + name
        + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    )


def number(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def file_of(tensors: list[bytes], *values: bytes) -> bytes:
    """A file with room for 32 floats behind a header of one or two tensors."""
    head = header(*values, tensors=len(tensors)) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(128)


ALIGNMENT = "general.alignment"


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (file_of([tensor_of(), tensor_of()]), ModelFormatError, "tensor t occurs twice"),
        (
            file_of([tensor_of()], number("k", 0, b"1"), number("k", 0, b"1")),
            ModelFormatError,
            "metadata value k occurs twice",
        ),
        (
            file_of([tensor_of(dims=(1,) * 5)]),
            ModelFormatError,
            "tensor t has 5 dimensions; 0 to 4",
        ),
        (file_of([tensor_of(dims=(33,))]), ModelFormatError, "tensor t ends at byte .* has 192"),
        (file_of([tensor_of(offset=32)]), ModelFormatError, "tensor t ends at byte"),
        (file_of([tensor_of(offset=8)]), ModelFormatError, "begins at 8, .* multiple of 32"),
        (file_of([tensor_of(offset=(1 << 64) - 32)]), ModelFormatError, "tensor t ends at byte"),
        (file_of([tensor_of(dims=(1 << 32, 1 << 32))]), ModelFormatError, "impossible shape"),
        (file_of([tensor_of(dims=(0, 1 << 62, 2))]), ModelFormatError, "impossible shape"),
        (file_of([tensor_of(dims=(48,), kind=2)]), ModelFormatError, "rows of 48 .* Q4_0 .* of 32"),
        (file_of([tensor_of(kind=99)]), UnsupportedModelError, "tensor t .* ggml type 99, which"),
        (file_of([tensor_of(kind=42)]), UnsupportedModelError, r"tensor t .* type 42 \(Q2_0\)"),
        (file_of([tensor_of(kind=4)]), UnsupportedModelError, r"tensor t .* type 4 \(Q4_2\)"),
        (file_of([tensor_of(b"\xff\xfe")]), ModelFormatError, "name of a tensor is not UTF-8"),
        (
            file_of([tensor_of()], number("k", 8, struct.pack("<Q", 1) + b"\xff")),
            ModelFormatError,
            "k is not UTF-8",
        ),
        *(
            (file_of([tensor_of()], number(ALIGNMENT, *value)), ModelFormatError, "power of two")
            for value in (
                (4, struct.pack("<I", 0)),
                (4, struct.pack("<I", 48)),
                (10, struct.pack("<Q", 32)),
                (8, text("32")),
            )
        ),
        (file_of([tensor_of()])[:-1], ModelFormatError, "tensor t ends at byte"),
        (header(tensors=1) + tensor_of()[:-1], ModelFormatError, "truncated"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, content: bytes, error: type, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=rf"model\.gguf.*{words}"):
        GGUFFile(path)


@pytest.mark.parametrize(
    "content",
    [
        file_of([tensor_of()]),
        file_of([tensor_of(dims=())]),
        file_of([tensor_of(dims=(0, 7))]),
        file_of([tensor_of(dims=(4, 2, 2, 2))]),
        file_of([tensor_of("ü", dims=(256,), kind=12, offset=0) + bytes(16)]),
        file_of([tensor_of(), tensor_of("u", (2,), 1, 64)], number(ALIGNMENT, 4, b"\x40\0\0\0")),
        file_of([tensor_of(dims=(2,), offset=1)], number(ALIGNMENT, 4, b"\1\0\0\0")),
        file_of([tensor_of(), tensor_of("e", (3,), 28)]),
    ],
)
def test_headers_that_are_unusual_and_right(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    same_as_the_gguf_package(path)


def same_as_the_gguf_package(path: Path) -> None:
    expected = gguf.GGUFReader(path)
    file = GGUFFile(path)
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    # repr tells 1 from 1.0 and True, and nan is nan
    assert repr(file.metadata) == repr(
        {key: field.contents() for key, field in expected.fields.items() if key not in own}
    )
    assert list(file.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        found = file.tensors[tensor.name]
        assert found.tensor_type == tensor.tensor_type
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.offset, found.size) == (tensor.data_offset, tensor.n_bytes)
        assert found.data.dtype == tensor.data.dtype
        np.testing.assert_array_equal(found.data, tensor.data)


@pytest.mark.slow
def test_header_is_what_the_gguf_package_reads(smollm2_gguf: Path) -> None:
    same_as_the_gguf_package(smollm2_gguf)


@pytest.mark.slow
def test_vocabulary_is_what_the_gguf_package_reads(llama_cpp_vocabularies: Path) -> None:
    same_as_the_gguf_package(llama_cpp_vocabularies / "ggml-vocab-deepseek-coder.gguf")


def test_every_kind_of_value_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    values = [number("flag", 7, b"\2"), number("word", 8, text("")), array(8, 0)]
    values += [
        number("flags", 9, struct.pack("<IQ", 7, 3) + b"\0\1\2"),
        number("none", 9, struct.pack("<IQ", 4, 0)),
        number("words", 9, struct.pack("<IQ", 8, 2) + text("") + text("a b")),
    ]
    for kind, format in formats.items():
        most = struct.pack(f"<{format}", float("nan") if format in "fd" else 77)
        least = b"\xff" * len(most)
        values.append(number(f"value {kind}", kind, least))
        values.append(number(f"list {kind}", 9, struct.pack("<IQ", kind, 2) + most + least))
    path = tmp_path / "model.gguf"
    path.write_bytes(header(*values))
    same_as_the_gguf_package(path)


def test_a_header_is_read_without_long_pauses(smollm2_gguf: Path) -> None:
    """Objects that the garbage collector looks at, one per string, stop everything for 0.2 s."""
    pauses: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            pauses.append(phase)

    gc.callbacks.append(note)
    try:
        file = GGUFFile(smollm2_gguf)
    finally:
        gc.callbacks.remove(note)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(pauses) <= 1
