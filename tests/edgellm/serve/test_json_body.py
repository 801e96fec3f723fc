"""Bodies as they are read: what is refused, and what is wrong with it."""

from __future__ import annotations

import json

import pytest

from edgellm.serve.http.body import parse_fields
from edgellm.serve.request_error import RequestError


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xef\xbb\xbf{\xff", "not UTF-8 at byte 4"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a whole number of more than 4300 digits"),
    ],
)
def test_what_is_wrong_with_a_body(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_fields(body)


def test_a_byte_order_mark_changes_nothing() -> None:
    assert parse_fields(b'\xef\xbb\xbf{"seed": 3}').whole("seed", 0, 9) == 3


@pytest.mark.parametrize(
    "values",
    [
        "[]," * 140_000,
        "{}," * 140_000,
        '{"a": [1]},' * 70_000,
        "1," * 1_200_000,
        '"",' * 1_200_000,
        '"\\\\","[{,]",' * 600_000,  # a backslash that hides no quote
        f"{'[' * 60}{']' * 60}," * 2200,
        "[" * 300_000,
    ],
)
def test_more_values_than_are_read(values: str) -> None:
    with pytest.raises(RequestError, match="more than the 1114112 values, 131072 of them lists"):
        parse_fields(f'{{"a": [{values} 0]}}'.encode())


@pytest.mark.parametrize(
    "text", ["[{,", '[",', "[\\", '[\\"', '[\\\\",', '[\n,"', '\\"' * 7 + "[{"]
)
def test_what_stands_in_texts_is_not_counted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the parts end that bodies are counted in."""
    monkeypatch.setattr("edgellm.serve.http.body._PART", 1 << 17)
    for shift in range(3):
        body = {"messages": ["x" * shift, text * (1_100_000 // len(text)), text], "b": [text]}
        assert parse_fields(json.dumps(body).encode()).values == body


def test_as_many_tokens_as_are_read_at_once() -> None:
    tokens = list(range(1 << 20))
    assert parse_fields(json.dumps({"tokens": tokens}).encode()).get("tokens") == tokens


def test_a_key_that_is_there_twice_among_many() -> None:
    """It is found in one pass: this took minutes."""
    keys = [f'"{number}": 0' for number in range(100_000)]
    with pytest.raises(RequestError, match="the key '99999' twice"):
        parse_fields(f"{{{', '.join(keys)}, {keys[-1]}}}".encode())
