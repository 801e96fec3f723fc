"""Judged by llama.cpp's own vocabularies with their expected tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.export.pre_tokenizers import PRE_TOKENIZERS
from edgellm.export.tokenizer_gguf import build_tokenizer
from edgellm.export.tokenizer_import import ImportedTokenizer, _from_gguf
from edgellm.graphs.gguf_file import GGUFFile

VOCABULARIES = [
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "refact",
    "starcoder",
]


def metadata_of(path: Path) -> Mapping[str, Any]:
    return GGUFFile(path).metadata


@cache
def imported(path: Path) -> ImportedTokenizer:
    """What an export takes of a vocabulary; the large ones take seconds."""
    return _from_gguf(metadata_of(path), origin=path.name)


@pytest.mark.clients
@pytest.mark.parametrize("name", VOCABULARIES)
def test_same_tokens_as_llama_cpp(llama_cpp_vocabularies: Path, name: str) -> None:
    path = llama_cpp_vocabularies / f"ggml-vocab-{name}.gguf"
    tokenizer = imported(path).tokenizer
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


# `llama_tokenize` of llama.cpp 0c1e57098 with add_special: "Hi  12 é" begins with the begin token
# where the file says so, or, as in llama-bpe, where its pre-tokenizer does.
PROMPTS = {
    "command-r": [5, 37535, 1667, 24, 25, 2301],
    "deepseek-coder": [32013, 11041, 243, 16, 17, 20516],
    "deepseek-llm": [100000, 11007, 243, 16, 17, 1450],
    "falcon": [5516, 204, 204, 928, 1685],
    "gpt-2": [17250, 220, 1105, 38251],
    "llama-bpe": [128000, 13347, 220, 220, 717, 4046],
    "llama-spm": [1, 6324, 259, 29896, 29906, 904],
    "mpt": [12764, 50276, 805, 3974],
    "phi-3": [1, 6324, 259, 29896, 29906, 904],
    "qwen2": [13048, 220, 220, 16, 17, 3958],
    "refact": [12575, 261, 35, 36, 5661],
    "starcoder": [12589, 280, 54, 55, 5685],
}


@pytest.mark.clients
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_begin_as_in_llama_cpp(llama_cpp_vocabularies: Path, name: str) -> None:
    found = imported(llama_cpp_vocabularies / f"ggml-vocab-{name}.gguf")
    tokens = found.tokenizer.encode("Hi  12 é").ids
    bos = found.tokenizer.token_to_id(found.entry.bos)
    assert ([bos, *tokens] if found.entry.add_bos else tokens) == PROMPTS[name]


@pytest.mark.clients
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gpt-neox",
            "12092 13 340 8 455 2 209 10683 1857 209 30 209 20 15 1047 28 209 95 89 63 19 "
            "95 209 9 8313 10",
        ),
        (
            "aquila",
            "22299 12 471 7 758 1 221 11218 2561 221 29 221 19 14 1556 27 221 94 88 62 18 "
            "94 221 8 21696 9",
        ),
    ],
)
def test_file_without_a_pre_tokenizer(
    llama_cpp_vocabularies: Path, name: str, expected: str
) -> None:
    """`llama_tokenize` of llama.cpp 0c1e57098, which warns that it takes its default."""
    metadata = metadata_of(llama_cpp_vocabularies / f"ggml-vocab-{name}.gguf")
    assert "tokenizer.ggml.pre" not in metadata
    tokens = list(map(int, expected.split()))
    text = "Hello, y'all! 12345 = 3.14; ~x^2~ (½)"
    for pre in ({}, {"tokenizer.ggml.pre": ""}, {"tokenizer.ggml.pre": "default"}):
        assert build_tokenizer({**metadata, **pre}, origin="").encode(text).ids == tokens


@pytest.mark.clients
def test_phi3_takes_the_space_behind_its_tokens(llama_cpp_vocabularies: Path) -> None:
    """`llama_tokenize` of llama.cpp 0c1e57098 with parse_special."""
    metadata = metadata_of(llama_cpp_vocabularies / "ggml-vocab-phi-3.gguf")
    tokenizer = build_tokenizer(metadata, origin="")
    assert tokenizer.encode("<|user|>\n Hi<|end|>\n<|assistant|>").ids == [
        32010,
        6324,
        32007,
        32001,
    ]
    assert tokenizer.encode("<s> a</s> b<|endoftext|> c").ids == [
        1,
        29871,
        263,
        2,
        289,
        32000,
        29871,
        274,
    ]


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
        ({"pre": "kimi-k2"}, UnsupportedModelError, "'kimi-k2'.*qwen2"),
        ({"model": "bert"}, UnsupportedModelError, "'bert'"),
        ({"tokens": None}, ModelFormatError, "tokens is missing"),
        ({"tokens": [1, 2, 3]}, ModelFormatError, "list of str"),
        ({"token_type": [1]}, ModelFormatError, "3 tokens but 1"),
        ({"merges": ["a c"]}, ModelFormatError, "damaged vocabulary"),
        ({"merges": ["b b"]}, ModelFormatError, "damaged vocabulary"),
        ({"merges": ["ab"]}, ModelFormatError, "merge 'ab' is not two tokens"),
        ({"bos_token_id": 3}, ModelFormatError, "bos_token_id is 3"),
        ({"eos_token_id": -1}, ModelFormatError, "eos_token_id is -1"),
        ({"tokens": ["a", "b", "x" * 2001]}, ModelFormatError, "token has 2001 characters; 2000"),
        (
            {"model": "llama", "tokens": ["a", "b", "x" * 10**7], "scores": [0.0] * 3},
            ModelFormatError,
            "token has 10000000 characters",
        ),
        ({"model": "llama"}, ModelFormatError, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, ModelFormatError, "3 tokens but 1 scores"),
    ],
)
def test_broken_vocabularies(changes: dict[str, Any], error: type, words: str) -> None:
    metadata = {**base(), **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}
    with pytest.raises(error, match=words):
        build_tokenizer(metadata, origin="model.gguf")


def test_a_merge_may_begin_with_a_space() -> None:
    changes = {"tokens": [" ", "a", " a"], "merges": ["  a"]}
    tokenizer = build_tokenizer(
        {**base(), **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}, origin=""
    )
    assert '[\n        " ",\n        "a"\n      ]' in tokenizer.to_str(pretty=True)


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("pre", [*PRE_TOKENIZERS, None])
def test_a_file_has_the_last_word_on_the_begin_token(pre: str | None, said: bool | None) -> None:
    metadata = {**base(), "tokenizer.ggml.bos_token_id": 0}
    del metadata["tokenizer.ggml.pre"]
    metadata |= {} if pre is None else {"tokenizer.ggml.pre": pre}
    metadata |= {} if said is None else {"tokenizer.ggml.add_bos_token": said}
    usual = pre is not None and PRE_TOKENIZERS[pre].add_bos
    assert _from_gguf(metadata, origin="").entry.add_bos is (usual if said is None else said)


def test_whether_prompts_begin_with_the_begin_token_is_no_text() -> None:
    with pytest.raises(ModelFormatError, match="add_bos_token"):
        _from_gguf({**base(), "tokenizer.ggml.add_bos_token": "false"}, origin="m.gguf")


# Types of tokens by their texts, what the file names as the end, and the ends.
@pytest.mark.parametrize(
    ("types", "eos", "ends"),
    [
        (
            {"<turn|>": 3, "<eos>": 3, "<|tool_response>": 3, "</s>": 3},
            "<eos>",
            "<eos> <turn|> <|tool_response>",
        ),
        ({"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, "<|return|>", "<|return|> <|call|>"),
        ({"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, "<|end|>", "<|return|> <|call|>"),
        ({"<|calls|>": 3, "<|flush|>": 3, "<|end|>": 3}, None, "<|calls|> <|flush|>"),
        ({"<|call|>": 3, "<|end|>": 3}, None, "<|call|> <|end|>"),
        ({"<|end|>": 3, "<|user|>": 3}, None, "<|end|>"),
        ({"[EOT]": 3, "[EOS]": 3, "[e~[": 3, "[PAD]": 3}, None, "[EOT] [EOS] [e~["),
        (
            {"<EOT>": 3, "_<EOT>": 3, "<end_of_utterance>": 3},
            None,
            "<end_of_utterance> <EOT> _<EOT>",
        ),
        ({"<｜end▁of▁sentence｜>": 3}, None, "<｜end▁of▁sentence｜>"),
        ({"<|im_end|>": 1, "<|im_start|>": 3}, None, "<|im_end|>"),
        ({"<|im_end|>": 4}, None, "<|im_end|>"),
        ({"</s>": 1, "<strike>": 1}, None, ""),
        ({"</s>": 1}, "</s>", "</s>"),
    ],
)
def test_tokens_that_end_an_answer(types: dict[str, int], eos: str | None, ends: str) -> None:
    tokens = [*types, "a", "b", "ab"]
    metadata = {
        **base(),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*types.values(), 1, 1, 1],
    }
    if eos is not None:
        metadata["tokenizer.ggml.eos_token_id"] = tokens.index(eos)
    found = _from_gguf(metadata, origin="")
    assert set(found.entry.eos) == set(ends.split())
    for token in set(types) & set(found.entry.eos) - {"</s>"}:
        assert found.tokenizer.encode(f"ab{token}ab").tokens == ["ab", token, "ab"]


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
    tokenizer = build_tokenizer(metadata, origin="")
    added = tokenizer.get_added_tokens_decoder()
    assert len(added) == len(tokens)
    assert added[63_999].content == tokens[-1]
    assert {token.special for token in added.values()} == {kind == 3}
    assert tokenizer.encode("<control 7><control 77>").ids == [7, 77]
