"""Fill-in-the-middle (infill): tokens of each model family, and infill prompts. Pure Python.

A family is recognized by the texts of its tokens; ids differ from model to model.

    psm    [prefix] text before the gap [suffix] text after it [middle]
    spm    [suffix] text after the gap [prefix] text before it [middle]: the text after the gap
           keeps its place in the KV cache while the user types before the gap

(Bavarian et al., Efficient Training of Language Models to Fill in the Middle, arXiv:2207.14255.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from edgellm.errors import UnsupportedModelError

# Maximum of tokens from the file with the gap: llama.cpp's default batch.
_FILE = 2048
# Tokens to keep free for an answer without `max_tokens`.
_ANSWER = 256
# Tokens to keep free for markers, begin token, and the line with the path.
_MARKERS = 16


@dataclass(frozen=True)
class Budget:
    """Maximum of tokens of each part of an infill prompt.

    Attributes:
        prefix: tokens from the end of the text before the gap.
        suffix: tokens from the beginning of the text after the gap.
        extra: tokens from the end of other files.
    """

    prefix: int
    suffix: int
    extra: int


def budget(ctx_size: int, *, max_tokens: int | None) -> Budget:
    """Share the context among prefix, suffix and other files of an infill prompt.

    Prefix and suffix have 3 to 1 of half the room that the answer leaves, at most 2048 tokens;
    other files have the rest.

    Args:
        ctx_size: tokens of the context.
        max_tokens: limit on the answer's tokens, or None.
    """
    answer = _ANSWER if max_tokens is None else max_tokens
    room = max(4, ctx_size - min(answer, ctx_size // 2) - _MARKERS)
    file = min(_FILE, room // 2)
    return Budget(prefix=3 * (file // 4), suffix=file // 4, extra=room - file)


Order = Literal["psm", "spm"]
ORDERS: tuple[str, ...] = get_args(Order)
# A function from text to token ids; texts of special tokens are encoded as plain text.
Encode = Callable[[str], list[int]]
# Maximum of characters to encode for each token that a budget allows; longer text is cut before it
# is encoded, which takes a second for some megabytes.
_LONG = 32
SequenceT = TypeVar("SequenceT", str, list[int])
# A character that no vocabulary joins with the text after it, see `_bare`.
_GUARD = "\u263a"


@dataclass(frozen=True, kw_only=True)
class Family:
    """The infill tokens and prompt order of a family of models.

    Attributes:
        prefix, suffix, middle: texts of the infill tokens; without `middle` the answer follows the
            last part.
        order: the order that models of the family are trained on.
        known_by: further tokens that tell the family from others with the same three.
        repository, file: tokens before a repository's name and before a file's path, if any.
        header: text before a file's content, in families without a token for files.
        stops: tokens that end the answer besides the model's own end tokens.
        stop_texts: texts that end the answer.
        middle_before_prefix: whether spm order is [prefix] [suffix] s [middle] p, as in CodeLlama.
        bare_suffix: whether the suffix is encoded without the space that SentencePiece would put
            before it.
    """

    name: str
    prefix: str
    suffix: str
    middle: str | None
    order: Order = "psm"
    known_by: tuple[str, ...] = ()
    repository: str | None = None
    file: str | None = None
    header: str = "# {path}\n"
    stops: tuple[str, ...] = ()
    stop_texts: tuple[str, ...] = ()
    middle_before_prefix: bool = False
    bare_suffix: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.prefix, self.suffix, self.middle) if text)

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """All tokens that end the answer, if the vocabulary has them."""
        more = (text for text in (self.repository, self.file) if text)
        return (*self.markers, *self.stops, *more)


# Base of several families that share these three tokens and differ in the rest.
_BARS = Family(
    name="fim",
    prefix="<|fim_prefix|>",
    suffix="<|fim_suffix|>",
    middle="<|fim_middle|>",
    stops=("<|fim_pad|>",),
)
_TAGS = Family(
    name="starcoder",
    prefix="<fim_prefix>",
    suffix="<fim_suffix>",
    middle="<fim_middle>",
    stops=("<fim_pad>", "<filename>"),
)

# Among families with the same three tokens, the more particular one stands first.
FAMILIES = (
    replace(
        _BARS,
        name="qwen2.5-coder",
        known_by=("<|file_sep|>",),
        repository="<|repo_name|>",
        file="<|file_sep|>",
        stops=("<|fim_pad|>", "<|im_start|>", "<|im_end|>"),
    ),
    replace(
        _BARS,
        name="codegemma",
        known_by=("<|file_separator|>",),
        file="<|file_separator|>",
        stops=("<end_of_turn>",),
    ),
    replace(_BARS, name="granite-4", known_by=("<|end_of_text|>",)),
    _BARS,
    replace(
        _TAGS,
        name="starcoder2",
        known_by=("<repo_name>", "<file_sep>"),
        repository="<repo_name>",
        file="<file_sep>",
    ),
    _TAGS,
    Family(name="santacoder", prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>"),
    Family(
        name="codellama",
        prefix="\u2581<PRE>",
        suffix="\u2581<SUF>",
        middle="\u2581<MID>",
        stops=("\u2581<EOT>",),
        middle_before_prefix=True,
        bare_suffix=True,
    ),
    Family(
        name="deepseek-coder",
        prefix="<\uff5cfim\u2581begin\uff5c>",
        suffix="<\uff5cfim\u2581hole\uff5c>",
        middle="<\uff5cfim\u2581end\uff5c>",
        header="#{path}\n",
        stops=("<|EOT|>",),
    ),
    Family(
        name="codestral",
        prefix="[PREFIX]",
        suffix="[SUFFIX]",
        middle=None,
        order="spm",
        header="+++++ {path}\n",
        stop_texts=("\n+++++ ",),
        bare_suffix=True,
    ),
    Family(
        name="glm",
        prefix="<|code_prefix|>",
        suffix="<|code_suffix|>",
        middle="<|code_middle|>",
        stops=("<|user|>",),
    ),
    Family(
        name="seed-coder",
        prefix="<[fim-prefix]>",
        suffix="<[fim-suffix]>",
        middle="<[fim-middle]>",
        order="spm",
    ),
    Family(name="falcon-h1", prefix="<|prefix|>", suffix="<|suffix|>", middle="<|middle|>"),
    Family(
        name="ling-coder",
        prefix="<|fim_begin|>",
        suffix="<|fim_hole|>",
        middle="<|fim_end|>",
        repository="<|repo_name|>",
        file="<|file_sep|>",
        stops=("<|fim_pad|>",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The text around a gap to be filled.

    Attributes:
        prefix: text of the file before the gap, up to `tail`.
        suffix: text of the file after the gap.
        extra: other files, as pairs of path and text.
        path: path of the file with the gap; used only beside other files or a repository.
        repository: name of the repository, or None.
        tail: text between `prefix` and the gap, which a budget does not cut.
    """

    prefix: str
    suffix: str
    extra: Sequence[tuple[str, str]] = ()
    path: str = "main"
    repository: str | None = None
    tail: str = ""


def find_family(vocabulary: Mapping[str, int], named: Mapping[str, str]) -> Family | None:
    """Find the family whose infill tokens a vocabulary has; None if it has none.

    Args:
        vocabulary: ids of all tokens by their texts.
        named: texts of tokens that a model file names itself (GGUF's `fim_pre_token_id` and so on),
            by their roles in `Family`; they take precedence over the known families.
    """
    for family in FAMILIES:
        told = {name: named[name] for name in ("prefix", "suffix", "middle") if name in named}
        if told and any(getattr(family, name) != text for name, text in told.items()):
            continue
        if all(text in vocabulary for text in (*family.markers, *family.known_by)):
            return family
    if {"prefix", "suffix"} <= set(named):
        return Family(
            name="named in the model file",
            prefix=named["prefix"],
            suffix=named["suffix"],
            middle=named.get("middle"),
            repository=named.get("repository"),
            file=named.get("file"),
        )
    return None


def require_family(
    vocabulary: Mapping[str, int], named: Mapping[str, str], *, model: str
) -> Family:
    """Find the family whose infill tokens a vocabulary has, without repository tokens it lacks.

    Args:
        model: name of the model, for the error.

    Raises:
        UnsupportedModelError: the vocabulary has no infill tokens.
    """
    family = find_family(vocabulary, named)
    if family is None:
        raise UnsupportedModelError(
            f"{model} has no fill-in-the-middle tokens (such as <|fim_prefix|>), so it cannot fill "
            "a gap; take a model that was trained for it, such as Qwen2.5-Coder, StarCoder2 or "
            "CodeGemma"
        )
    # tokens that only some models of a family have
    repository, file = (
        text if text in vocabulary else None for text in (family.repository, family.file)
    )
    return replace(family, repository=repository, file=file)


def assemble(
    family: Family,
    gap: Gap,
    *,
    encode: Encode,
    vocabulary: Mapping[str, int],
    bos: int | None,
    order: Order | None = None,
    budget: Budget | None = None,
) -> list[int]:
    """Build the infill prompt for a gap, as token ids.

    Args:
        encode: function from text to ids, without a begin token.
        vocabulary: ids of all tokens by their texts.
        bos: id of the begin token, or None for a model that wants none.
        order: order of the parts; None is the family's own.
        budget: maximum of tokens of each part; None takes all parts whole.
    """
    most = sys.maxsize if budget is None else budget.extra * _LONG
    context, lead = _other_files(family, gap, encode, vocabulary, most=most)
    if budget is None:
        before, behind = encode(lead + gap.prefix + gap.tail), _suffix(family, gap.suffix, encode)
    else:
        context = _end(context, budget.extra)
        before, behind = _within(budget, family, gap, encode)
        before = _end(encode(lead), budget.extra) + before
    prefix = [vocabulary[family.prefix]]
    suffix = [vocabulary[family.suffix], *behind]
    middle = [] if family.middle is None else [vocabulary[family.middle]]
    if (order or family.order) == "psm":
        parts = [*prefix, *before, *suffix, *middle]
    elif family.middle_before_prefix:
        parts = [*prefix, *suffix, *middle, *before]
    else:
        parts = [*suffix, *prefix, *before, *middle]
    return [*([] if bos is None else [bos]), *context, *parts]


def _within(
    budget: Budget, family: Family, gap: Gap, encode: Encode
) -> tuple[list[int], list[int]]:
    """Encode the text before and after a gap within a budget; the tail counts as suffix."""
    tail = len(encode(gap.tail))
    prefix = _end(gap.prefix, budget.prefix * _LONG)
    before = _end(encode(prefix + gap.tail), budget.prefix + tail)
    count = max(0, budget.suffix - tail)
    return before, _suffix(family, gap.suffix[: count * _LONG], encode)[:count]


def _end(values: SequenceT, count: int) -> SequenceT:
    return values[max(0, len(values) - count) :]


def _suffix(family: Family, text: str, encode: Encode) -> list[int]:
    return _bare(encode, text) if family.bare_suffix else encode(text)


def _other_files(
    family: Family, gap: Gap, encode: Encode, vocabulary: Mapping[str, int], *, most: int
) -> tuple[list[int], str]:
    """Encode other files: as tokens at the prompt's start, or as text at the head of the prefix.

    Args:
        most: maximum of characters taken from the files, from their end.
    """
    if not gap.extra and gap.repository is None:
        return [], ""
    if family.file is None:
        files = [family.header.format(path=path) + _line(text) for path, text in gap.extra]
        lead = "".join(files) + (family.header.format(path=gap.path) if files else "")
        return [], _end(lead, most)
    files = [f"{path}\n{_line(text)}" for path, text in gap.extra]
    tokens: list[int] = []
    if family.repository is not None and gap.repository is not None:
        tokens += [vocabulary[family.repository], *encode(f"{gap.repository}\n")]
    for text in _last(files, most):
        tokens += [vocabulary[family.file], *encode(text)]
    return [*tokens, vocabulary[family.file], *encode(f"{gap.path}\n")], ""


def _last(texts: Sequence[str], count: int) -> list[str]:
    """Keep the last `count` characters of consecutive texts."""
    kept: list[str] = []
    for text in reversed(texts):
        kept.append(_end(text, count))
        count -= len(kept[-1])
        if not count:
            break
    return kept[::-1]


def _line(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def _bare(encode: Encode, text: str) -> list[int]:
    """Encode a text without the space that SentencePiece puts before the start of a document."""
    guard = encode(_GUARD)
    return encode(_GUARD + text)[len(guard) :]
