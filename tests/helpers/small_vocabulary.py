"""A SentencePiece vocabulary of some hundred tokens, as a GGUF file has it: all bytes, one word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm.export.tokenizer_gguf import build_tokenizer
from edgellm.store.manifest import TOKENIZER, TokenizerEntry
from edgellm.text.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_WORD = "▁Paris"
FIRST_TEXT = 259  # the id of the first token that is neither special nor a byte


def sentencepiece_metadata() -> dict[str, Any]:
    specials = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *map(chr, range(ord("A"), ord("z") + 1))]
    words = [_WORD[:end] for end in range(2, len(_WORD) + 1)]
    types = {_BYTE: bytes_, _NORMAL: letters + words}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": specials + bytes_ + letters + words,
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL]
        + [kind for kind, tokens in types.items() for _ in tokens],
        "tokenizer.ggml.scores": [0.0] * (FIRST_TEXT + len(letters))
        + [-float(i) for i in range(len(words))],
    }


def save_sentencepiece(folder: Path) -> Tokenizer:
    build_tokenizer(sentencepiece_metadata(), origin="").save(str(folder / TOKENIZER))
    return Tokenizer(folder, TokenizerEntry("<s>", True, ("</s>",)))
