"""Build a `tokenizers` tokenizer from the vocabulary in a GGUF file.

`tokenizer.ggml.model` names the algorithm (gpt2: byte-level BPE with merges; llama: SentencePiece
BPE with scores) and `tokenizer.ggml.pre` the way text is cut before it. The tests compare with the
tokens that llama.cpp expects from its own vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edgellm.errors import ModelFormatError, UnsupportedModelError

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)


def build_tokenizer(metadata: Mapping[str, Any], *, origin: str) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        ModelFormatError: lists that are missing, of different lengths or refer to nothing.
        UnsupportedModelError: an algorithm or pre-tokenizer that is not known.
    """
    tokens = _list(metadata, "tokens", str, origin)
    types = _list(metadata, "token_type", int, origin)
    if len(types) != len(tokens):
        raise ModelFormatError(
            f"{origin}: {len(tokens)} tokens but {len(types)} token types in the vocabulary"
        )
    for key, token in metadata.items():
        if (
            key.startswith("tokenizer.ggml.")
            and key.endswith("_token_id")
            and not (type(token) is int and 0 <= token < len(tokens))
        ):
            raise ModelFormatError(f"{origin}: {key} is {token!r}, not a token")
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(metadata, tokens, origin)
        elif kind == "llama":
            tokenizer = _sentencepiece(metadata, tokens, types, origin)
        else:
            raise UnsupportedModelError(
                f"{origin}: tokenizer {kind!r} is not supported; supported are gpt2 and llama"
            )
        _add_tokens(tokenizer, tokens, types)
    except (ModelFormatError, UnsupportedModelError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a Rust panic is a BaseException
        raise ModelFormatError(f"{origin}: damaged vocabulary: {error}") from None
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], origin: str) -> Tokenizer:
    merges = [m.split(" ", 1) for m in _list(metadata, "merges", str, origin)]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{origin}: pre-tokenizer {pre!r} is not supported; supported are "
            + ", ".join(sorted(_PRE_TOKENIZERS))
        )
    # Llama 3's merges do not reach every token of its vocabulary.
    whole_words = pre in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [(m[0], m[-1]) for m in merges],
            ignore_merges=whole_words,
        )
    )
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(*patterns: str) -> list[Any]:
    """Cut by each expression in turn, then map bytes to characters."""
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _gpt2_single_digits() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _llama3() -> list[Any]:
    return _split(_LLAMA3)


def _qwen2() -> list[Any]:
    return _split(_QWEN2)


def _deepseek_coder() -> list[Any]:
    return _split(*_DEEPSEEK_CODER)


_PRE_TOKENIZERS = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "smollm": _gpt2_single_digits,
    "starcoder": _gpt2_single_digits,
    "refact": _gpt2_single_digits,
    "command-r": _gpt2_single_digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "deepseek-coder": _deepseek_coder,
}


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], origin: str
) -> Tokenizer:
    scores = _list(metadata, "scores", float, origin)
    if len(scores) != len(tokens):
        raise ModelFormatError(
            f"{origin}: {len(tokens)} tokens but {len(scores)} scores in the vocabulary"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_from_scores(vocabulary, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that joins into a token, the best-scored result first.

    SentencePiece merges the pair whose result has the highest score; listing the pairs in that
    order makes a rank-based BPE do the same (transformers' SentencePieceExtractor).
    """
    merges = []
    for token, index in vocabulary.items():
        if types[index] != _NORMAL or len(token) < 2:
            continue
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-scores[index], order, pair) for order, pair in enumerate(pairs)]
    merges.sort(key=lambda merge: merge[0])
    return [pair for _, _, pair in merges]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens are special; user-defined ones are text that is never split.

    All of a kind in one call, because each call builds the search for all of them anew.
    """
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _list(metadata: Mapping[str, Any], key: str, kind: type, origin: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(v, kind) for v in values[:1]):
        raise ModelFormatError(
            f"{origin}: tokenizer.ggml.{key} is missing or not a list of {kind.__name__}"
        )
    return values
