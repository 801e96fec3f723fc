"""Prompts for a gap, against what each family's own documentation or reference code assembles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgellm.errors import UnsupportedModelError
from edgellm.text.fim import FAMILIES, Family, Gap, assemble, find_family, require_family

GAP = Gap(prefix="a = ", suffix="\nb\n")


class Words:
    """A tokenizer with a token for each character and for each special text; ids are its own."""

    def __init__(self, specials: Sequence[str], *, leading_space: bool = False) -> None:
        self.vocabulary = {text: 1000 + i for i, text in enumerate(specials)}
        self._leading_space = leading_space

    def encode(self, text: str) -> list[int]:
        if self._leading_space and text:
            text = "\u2581" + text
        return [ord(c) for c in text]

    def show(self, ids: Sequence[int]) -> str:
        names = {i: text for text, i in self.vocabulary.items()}
        return "".join(names.get(i) or chr(i) for i in ids)


def family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def all_tokens(found: Family) -> list[str]:
    return list(dict.fromkeys((*found.markers, *found.known_by, *found.stop_tokens)))


def shown(name: str, gap: Gap = GAP, *, bos: str | None = None, **options: object) -> str:
    found = family(name)
    sentencepiece = name in ("codellama", "codestral")
    words = Words([*all_tokens(found), *([bos] if bos else [])], leading_space=sentencepiece)
    assert find_family(words.vocabulary, {}) == found
    ids = assemble(
        require_family(words.vocabulary, {}, model="m"),
        gap,
        encode=words.encode,
        vocabulary=words.vocabulary,
        bos=words.vocabulary[bos] if bos else None,
        **options,
    )
    return words.show(ids)


@pytest.mark.parametrize(
    ("name", "bos", "expected"),
    [
        ("qwen2.5-coder", None, "<|fim_prefix|>a = <|fim_suffix|>\nb\n<|fim_middle|>"),
        ("fim", None, "<|fim_prefix|>a = <|fim_suffix|>\nb\n<|fim_middle|>"),
        ("granite-4", None, "<|fim_prefix|>a = <|fim_suffix|>\nb\n<|fim_middle|>"),
        ("codegemma", "<bos>", "<bos><|fim_prefix|>a = <|fim_suffix|>\nb\n<|fim_middle|>"),
        ("starcoder2", None, "<fim_prefix>a = <fim_suffix>\nb\n<fim_middle>"),
        ("starcoder", None, "<fim_prefix>a = <fim_suffix>\nb\n<fim_middle>"),
        ("santacoder", None, "<fim-prefix>a = <fim-suffix>\nb\n<fim-middle>"),
        ("codellama", "<s>", "<s>▁<PRE>▁a = ▁<SUF>\nb\n▁<MID>"),
        (
            "deepseek-coder",
            "<｜begin▁of▁sentence｜>",
            "<｜begin▁of▁sentence｜><｜fim▁begin｜>a = <｜fim▁hole｜>\nb\n<｜fim▁end｜>",
        ),
        ("codestral", "<s>", "<s>[SUFFIX]\nb\n[PREFIX]▁a = "),
        ("glm", None, "<|code_prefix|>a = <|code_suffix|>\nb\n<|code_middle|>"),
        ("seed-coder", None, "<[fim-suffix]>\nb\n<[fim-prefix]>a = <[fim-middle]>"),
        ("falcon-h1", None, "<|prefix|>a = <|suffix|>\nb\n<|middle|>"),
        ("ling-coder", None, "<|fim_begin|>a = <|fim_hole|>\nb\n<|fim_end|>"),
    ],
)
def test_each_family(name: str, bos: str | None, expected: str) -> None:
    assert shown(name, bos=bos) == expected


def test_every_family_is_tested() -> None:
    (mark,) = test_each_family.pytestmark
    assert {row[0] for row in mark.args[1]} == {family.name for family in FAMILIES}


def test_suffix_first() -> None:
    qwen = "<|fim_suffix|>\nb\n<|fim_prefix|>a = <|fim_middle|>"
    assert shown("qwen2.5-coder", order="spm") == qwen
    assert shown("codellama", bos="<s>", order="spm") == "<s>▁<PRE>▁<SUF>\nb\n▁<MID>▁a = "
    assert shown("seed-coder", order="psm") == "<[fim-prefix]>a = <[fim-suffix]>\nb\n<[fim-middle]>"


def test_other_files() -> None:
    gap = Gap(
        prefix="p", suffix="s", extra=[("x.py", "x = 1"), ("y.py", "")], path="z.py", repository="r"
    )
    assert shown("qwen2.5-coder", gap) == (
        "<|repo_name|>r\n<|file_sep|>x.py\nx = 1\n<|file_sep|>y.py\n<|file_sep|>z.py\n"
        "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    )
    assert shown("codegemma", gap, bos="<bos>") == (
        "<bos><|file_separator|>x.py\nx = 1\n<|file_separator|>y.py\n<|file_separator|>z.py\n"
        "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    )
    assert shown("deepseek-coder", gap) == (
        "<｜fim▁begin｜>#x.py\nx = 1\n#y.py\n#z.py\np<｜fim▁hole｜>s<｜fim▁end｜>"
    )
    assert (
        shown("codestral", gap) == "[SUFFIX]s[PREFIX]▁+++++ x.py\nx = 1\n+++++ y.py\n+++++ z.py\np"
    )


def test_markers_in_the_text_stay_text() -> None:
    gap = Gap(prefix="<|fim_middle|>", suffix="<|fim_suffix|>")
    found = family("qwen2.5-coder")
    words = Words(all_tokens(found))
    ids = assemble(found, gap, encode=words.encode, vocabulary=words.vocabulary, bos=None)
    assert [i for i in ids if i >= 1000] == [words.vocabulary[text] for text in found.markers]


def test_a_token_that_the_vocabulary_lacks_is_left_out() -> None:
    words = Words(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"])
    found = require_family(words.vocabulary, {}, model="m")
    assert (found.name, found.file, found.repository) == ("qwen2.5-coder", "<|file_sep|>", None)


def test_tokens_that_the_model_file_names() -> None:
    words = Words(["<P>", "<S>", "<M>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    named = {"prefix": "<P>", "suffix": "<S>", "middle": "<M>"}
    found = require_family(words.vocabulary, named, model="m")
    ids = assemble(found, GAP, encode=words.encode, vocabulary=words.vocabulary, bos=None)
    assert words.show(ids) == "<P>a = <S>\nb\n<M>"


@pytest.mark.parametrize(
    "vocabulary",
    [
        # SmolLM2 has the tokens for files, and none for a gap
        ["<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<|im_end|>"],
        ["<|fim_prefix|>", "<|fim_middle|>"],
        [],
    ],
)
def test_without_the_tokens_it_is_an_error(vocabulary: list[str]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no fill-in-the-middle tokens.*Qwen2.5-Coder"):
        require_family(Words(vocabulary).vocabulary, {}, model="smollm2")
