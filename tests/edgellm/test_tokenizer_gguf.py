"""Judged by llama.cpp's own vocabularies with their expected tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.export.tokenizer_gguf import build_tokenizer
from edgellm.graphs.gguf_file import GGUFFile

VOCABULARIES = [
    "command-r",
    "deepseek-coder",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "phi-3",
    "qwen2",
    "refact",
    "starcoder",
]


def metadata_of(path: Path) -> Mapping[str, Any]:
    return GGUFFile(path).metadata


@pytest.mark.parametrize("name", VOCABULARIES)
def test_same_tokens_as_llama_cpp(llama_cpp_vocabularies: Path, name: str) -> None:
    path = llama_cpp_vocabularies / f"ggml-vocab-{name}.gguf"
    tokenizer = build_tokenizer(metadata_of(path), origin=name)
    tokenizer.encode_special_tokens = True
    texts = path.with_suffix(".gguf.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text("utf-8").split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == [int(token) for token in line.split()], repr(text)
        # SentencePiece's first space and NFC are the only things that decoding may change
        if name not in ("llama-spm", "phi-3", "qwen2"):
            assert tokenizer.decode(found, skip_special_tokens=False) == text


def test_smollm_splits_digits(smollm2_gguf: Path) -> None:
    tokenizer = build_tokenizer(metadata_of(smollm2_gguf), origin="")
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]


def base() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"pre": "mpt"}, UnsupportedModelError, "'mpt'.*qwen2"),
        ({"model": "bert"}, UnsupportedModelError, "'bert'"),
        ({"tokens": None}, ModelFormatError, "tokens is missing"),
        ({"tokens": [1, 2, 3]}, ModelFormatError, "list of str"),
        ({"token_type": [1]}, ModelFormatError, "3 tokens but 1"),
        ({"merges": ["a c"]}, ModelFormatError, "damaged vocabulary"),
        ({"merges": ["b b"]}, ModelFormatError, "damaged vocabulary"),
        ({"bos_token_id": 3}, ModelFormatError, "bos_token_id is 3"),
        ({"eos_token_id": -1}, ModelFormatError, "eos_token_id is -1"),
        ({"model": "llama"}, ModelFormatError, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, ModelFormatError, "3 tokens but 1 scores"),
    ],
)
def test_broken_vocabularies(changes: dict[str, Any], error: type, words: str) -> None:
    metadata = {**base(), **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}
    with pytest.raises(error, match=words):
        build_tokenizer(metadata, origin="model.gguf")


@pytest.mark.parametrize("kind", [3, 4])
def test_many_control_tokens_take_no_longer_than_others(kind: int) -> None:
    """64,000 of them took the square of their number once: hours."""
    tokens = [f"<control {i}>" for i in range(64_000)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kind] * len(tokens),
        "tokenizer.ggml.merges": [],
    }
    began = time.monotonic()
    tokenizer = build_tokenizer(metadata, origin="")
    assert time.monotonic() - began < 30
    added = tokenizer.get_added_tokens_decoder()
    assert len(added) == len(tokens)
    assert added[63_999].content == tokens[-1]
    assert {token.special for token in added.values()} == {kind == 3}
    assert tokenizer.encode("<control 7><control 77>").ids == [7, 77]
