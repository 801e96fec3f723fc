"""Builder of a `tokenizers` tokenizer from the vocabulary in a GGUF file.

`tokenizer.ggml.model` names the algorithm (gpt2: byte-level BPE with merges; llama: SentencePiece
BPE with scores; gemma4: SentencePiece BPE with merges) and `tokenizer.ggml.pre` the pre-tokenizer.
The tests compare with the tokens that llama.cpp expects from its own vocabularies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.export.pre_tokenizers import PRE_TOKENIZERS

# Many files name only one end token, and a chat model then talks on as the user. So end tokens are
# recognized by their texts too, as in llama.cpp (src/llama-vocab.cpp, `special_eog_ids`).

# A plain token of this text is an HTML tag in some vocabularies; people write none of the other
# texts below.
_STRIKE = "</s>"
_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    _STRIKE,
    "<eos>",
)


def is_end_text(text: str) -> bool:
    """Whether a token of this text ends an answer, whatever type it has in the file."""
    return text in _TEXTS and text != _STRIKE


def end_tokens(tokenizer: Tokenizer, named: Iterable[str | None]) -> tuple[str, ...]:
    """Return the texts of the tokens that end an answer.

    Args:
        named: texts that the file names as end tokens; None and texts that the tokenizer lacks are
            left out.
    """
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    texts = [t for t in named if t is not None and tokenizer.token_to_id(t) is not None]
    ends = dict.fromkeys([*texts, *(t for t in _TEXTS if t in special)])
    return tuple(text for text in ends if not _goes_on(text, ends))


def _goes_on(text: str, ends: Collection[str]) -> bool:
    """Whether an answer goes on after the token `text`, by the other end tokens in `ends`."""
    if text == "<|end|>":  # ends a message; gpt-oss and Solar write several in one answer
        calls = "<|call|>" in ends or "<|calls|>" in ends
        return calls and ("<|return|>" in ends or "<|flush|>" in ends)
    return text == _STRIKE and "<|tool_response>" in ends  # plain text in Gemma 4


_PRE = "tokenizer.ggml.pre"
_GEMMA4 = "gemma4"
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Limit on a token's characters: released vocabularies have up to some hundred, and the time of
# reading grows with their square.
_LONGEST_TOKEN = 2000
# Tokens of Phi-3 that a space may follow.
_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")


def build_tokenizer(metadata: Mapping[str, Any], *, origin: str) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Args:
        metadata: the file's metadata.
        origin: name of the file, for errors.

    Raises:
        ModelFormatError: a list is missing, has another length or refers to unknown tokens.
        UnsupportedModelError: the algorithm or the pre-tokenizer is not known.
    """
    tokens = _list(metadata, "tokens", str, origin)
    types = _list(metadata, "token_type", int, origin)
    if len(types) != len(tokens):
        raise ModelFormatError(
            f"{origin}: {len(tokens)} tokens but {len(types)} token types in the vocabulary"
        )
    longest = max(map(len, tokens), default=0)
    if longest > _LONGEST_TOKEN:
        raise ModelFormatError(
            f"{origin}: a token has {longest} characters; {_LONGEST_TOKEN} are allowed"
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
            scores = _list(metadata, "scores", float, origin)
            tokenizer = _sentencepiece(metadata, tokens, types, scores, origin)
        elif kind == _GEMMA4:
            merges = [_pair(merge) for merge in _list(metadata, "merges", str, origin)]
            tokenizer = _merged_characters(tokens, types, merges)
        else:
            raise UnsupportedModelError(
                f"{origin}: tokenizer {kind!r} is not supported; supported are gpt2, llama and "
                f"{_GEMMA4}"
            )
        name = str(metadata.get("general.name", "")).lower()
        _add_tokens(tokenizer, tokens, types, phi3="phi-3" in name or "phi3" in name)
    except (ModelFormatError, UnsupportedModelError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a Rust panic is a BaseException
        raise ModelFormatError(f"{origin}: damaged vocabulary: {error}") from None
    return tokenizer


def adds_bos(metadata: Mapping[str, Any], stated: bool | None) -> bool:
    """Whether prompts of a GGUF file begin with the begin token.

    Args:
        stated: the file's `add_bos_token`, which is wrong in files of Gemma 4; None: it has none.
    """
    kind = metadata["tokenizer.ggml.model"]
    if kind == _GEMMA4:
        return True
    if stated is not None:
        return stated
    if kind == "llama":
        return True
    return PRE_TOKENIZERS[metadata.get(_PRE) or "default"].add_bos


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], origin: str) -> Tokenizer:
    name = metadata.get(_PRE) or "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{origin}: pre-tokenizer {name!r} is not supported; supported are "
            + ", ".join(sorted(PRE_TOKENIZERS))
        )
    pre = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [_pair(merge) for merge in _list(metadata, "merges", str, origin)],
            ignore_merges=pre.whole_words,
        )
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge into its two tokens; the first may itself begin with a space."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ValueError(f"merge {merge!r} is not two tokens")
    return merge[:cut], merge[cut + 1 :]


def _merged_characters(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]
) -> Tokenizer:
    """Build Gemma 4's BPE of characters: spaces are ▁, and runs of line ends stand apart."""
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            list(merges),
            unk_token=_unknown_token(tokens, types),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _unknown_token(tokens: Sequence[str], types: Sequence[int]) -> str | None:
    return next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    origin: str,
) -> Tokenizer:
    if len(scores) != len(tokens):
        raise ModelFormatError(
            f"{origin}: {len(tokens)} tokens but {len(scores)} scores in the vocabulary"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_from_scores(vocabulary, scores, types),
            unk_token=_unknown_token(tokens, types),
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
    """Return every pair of tokens that joins into a token, the best-scored result first.

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


def _add_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], *, phi3: bool
) -> None:
    """Add control tokens as special tokens, and user-defined ones as text that is never split.

    Tokens that end an answer are special whatever their type, which some files have wrong. All
    tokens of a kind are added in one call, because each call builds the search for all of them
    anew.

    Args:
        phi3: whether the space after a token belongs to it, which GGUF files cannot specify.
    """
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        rstrip = phi3 and token not in _NEVER_STRIP
        if kind in (_CONTROL, _UNKNOWN) or is_end_text(token):
            special.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False, rstrip=rstrip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _list(metadata: Mapping[str, Any], key: str, kind: type, origin: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(v, kind) for v in values[:1]):
        raise ModelFormatError(
            f"{origin}: tokenizer.ggml.{key} is missing or not a list of {kind.__name__}"
        )
    return values
