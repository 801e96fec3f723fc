"""Prompts for a gap in real vocabularies: the ids that each family's reference code assembles.

Families whose vocabulary no Python package carries are in test_fim.py, by the texts of their
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from sentencepiece import SentencePieceProcessor

from edgellm.export.tokenizer_gguf import build_tokenizer
from edgellm.infill import infill_tokens
from edgellm.store.manifest import TOKENIZER, TokenizerEntry
from edgellm.text.fim import Gap, Order, require_family
from edgellm.text.tokenizer import Tokenizer

pytestmark = pytest.mark.clients

GAPS = [
    Gap(prefix="def add(a, b):\n    return ", suffix="\n\nprint(add(1, 2))\n"),
    Gap(prefix="x = [", suffix="  , 3]"),
    Gap(prefix="    # Zürich ☺\n\t", suffix=" é\r\n"),
    Gap(prefix=" ", suffix="\r\n\r\n"),
    Gap(prefix="", suffix="end"),
    Gap(prefix="begin", suffix=""),
]
# Where Qwen2.5-Coder's tokenizer_config.json puts them; in Qwen2's vocabulary nothing is there.
QWEN_CODER = {
    151659: "<|fim_prefix|>",
    151660: "<|fim_middle|>",
    151661: "<|fim_suffix|>",
    151662: "<|fim_pad|>",
    151663: "<|repo_name|>",
    151664: "<|file_sep|>",
}
CODELLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
CONTROL = 3  # a value of tokenizer.ggml.token_type


def of_gguf(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def of_sentencepiece(model: SentencePieceProcessor) -> dict[str, Any]:
    """What llama.cpp's converter writes into a GGUF file."""
    ids = range(model.vocab_size())
    kinds = ((model.is_unknown, 2), (model.is_control, CONTROL), (model.is_byte, 6))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            next((kind for is_kind, kind in kinds if is_kind(i)), 1) for i in ids
        ],
    }


def built(metadata: Mapping[str, Any], folder: Path, *, bos: str | None, eos: str) -> Tokenizer:
    build_tokenizer(metadata, origin="").save(str(folder / TOKENIZER))
    return Tokenizer(folder, TokenizerEntry(bos, bos is not None, (eos,)))


def prompt(tokenizer: Tokenizer, gap: Gap, *, family: str, order: Order | None = None) -> list[int]:
    assert require_family(tokenizer.vocabulary, tokenizer.fim, model="m").name == family
    return infill_tokens(tokenizer, gap, model="m", order=order)


@pytest.mark.parametrize(("name", "family"), [("starcoder", "starcoder2"), ("refact", "starcoder")])
def test_starcoder(llama_cpp_vocabularies: Path, tmp_path: Path, name: str, family: str) -> None:
    metadata = of_gguf(llama_cpp_vocabularies / f"ggml-vocab-{name}.gguf")
    tokenizer = built(metadata, tmp_path, bos=None, eos="<|endoftext|>")
    for gap in GAPS:
        card = f"<fim_prefix>{gap.prefix}<fim_suffix>{gap.suffix}<fim_middle>"
        expected = tokenizer.encode(card, parse_special=True)
        assert prompt(tokenizer, gap, family=family) == expected
        assert [i for i in expected if i <= 4] == [1, 3, 2]


def test_deepseek_coder(llama_cpp_vocabularies: Path, tmp_path: Path) -> None:
    metadata = of_gguf(llama_cpp_vocabularies / "ggml-vocab-deepseek-coder.gguf")
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    tokenizer = built(metadata, tmp_path, bos=begin, eos=end)
    for gap in GAPS:
        card = f"<｜fim▁begin｜>{gap.prefix}<｜fim▁hole｜>{gap.suffix}<｜fim▁end｜>"
        expected = tokenizer.encode(card, parse_special=True)
        assert expected[0] == tokenizer.vocabulary[begin]
        assert prompt(tokenizer, gap, family="deepseek-coder") == expected


def test_qwen_coder(llama_cpp_vocabularies: Path, tmp_path: Path) -> None:
    metadata = of_gguf(llama_cpp_vocabularies / "ggml-vocab-qwen2.gguf")
    for token, text in QWEN_CODER.items():
        assert metadata["tokenizer.ggml.tokens"][token] == f"[PAD{token}]"
        metadata["tokenizer.ggml.tokens"][token] = text
        metadata["tokenizer.ggml.token_type"][token] = CONTROL
    tokenizer = built(metadata, tmp_path, bos=None, eos="<|endoftext|>")
    for gap in GAPS:
        readme = f"<|fim_prefix|>{gap.prefix}<|fim_suffix|>{gap.suffix}<|fim_middle|>"
        expected = tokenizer.encode(readme, parse_special=True)
        assert prompt(tokenizer, gap, family="qwen2.5-coder") == expected
        assert [i for i in expected if i in QWEN_CODER] == [151659, 151661, 151660]

        project = replace(gap, extra=[("a.py", "a = 1\n")], path="b.py", repository="r")
        readme = f"<|repo_name|>r\n<|file_sep|>a.py\na = 1\n<|file_sep|>b.py\n{readme}"
        expected = tokenizer.encode(readme, parse_special=True)
        assert prompt(tokenizer, project, family="qwen2.5-coder") == expected


def without_space(model: SentencePieceProcessor, text: str) -> list[int]:
    """`encode_infilling` of Code Llama's tokenizer.py and of mistral_common's instruct.py."""
    return list(model.encode("☺" + text)[2:])


def test_codellama(mistral_vocabularies: Path, tmp_path: Path) -> None:
    model = SentencePieceProcessor(model_file=str(mistral_vocabularies / "tokenizer.model.v1"))
    metadata = of_sentencepiece(model)
    first = model.vocab_size()
    metadata["tokenizer.ggml.tokens"] += CODELLAMA
    metadata["tokenizer.ggml.scores"] += [0.0] * len(CODELLAMA)
    metadata["tokenizer.ggml.token_type"] += [CONTROL] * len(CODELLAMA)
    tokenizer = built(metadata, tmp_path, bos="<s>", eos="</s>")
    bos, pre, suf, mid = model.bos_id(), first, first + 1, first + 2
    for gap in GAPS:
        before, behind = model.encode(gap.prefix), without_space(model, gap.suffix)
        # infilling_prompt_tokens of Code Llama's generation.py
        assert prompt(tokenizer, gap, family="codellama") == [bos, pre, *before, suf, *behind, mid]
        suffix_first = [bos, pre, suf, *behind, mid, *before]
        assert prompt(tokenizer, gap, family="codellama", order="spm") == suffix_first


def test_codestral(mistral_vocabularies: Path, tmp_path: Path) -> None:
    file = mistral_vocabularies / "mistral_instruct_tokenizer_240323.model.v3"
    model = SentencePieceProcessor(model_file=str(file))
    tokenizer = built(of_sentencepiece(model), tmp_path, bos="<s>", eos="</s>")
    prefix, suffix = model.piece_to_id("[PREFIX]"), model.piece_to_id("[SUFFIX]")
    for gap in GAPS:
        # encode_fim of mistral_common's instruct.py
        behind = without_space(model, gap.suffix) if gap.suffix else []
        expected = [model.bos_id(), suffix, *behind, prefix, *model.encode(gap.prefix)]
        assert prompt(tokenizer, gap, family="codestral") == expected
