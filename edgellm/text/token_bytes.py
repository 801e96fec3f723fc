"""The bytes of single tokens, which may be parts of characters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The notation of bytes in a vocabulary, found from its tokenizer.json.

    Args:
        description: content of tokenizer.json.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        kinds = json.dumps(description.get("decoder"))
        self._byte_level = '"ByteLevel"' in kinds
        self._added = {entry["content"] for entry in description.get("added_tokens") or ()}

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes that a token, given as its vocabulary entry, stands for."""
        if text in self._added:
            return text.encode(errors="replace")
        if self._byte_level:
            letters = _letters()
            if all(letter in letters for letter in text):
                return bytes(letters[letter] for letter in text)
            return text.encode(errors="replace")
        if byte := _BYTE.fullmatch(text):
            return bytes([int(byte[1], 16)])
        return text.replace("\u2581", " ").encode(errors="replace")


@cache
def _letters() -> Mapping[str, int]:
    """Return the byte of each of GPT-2's letters.

    A printable byte is its own character; the others are characters from 256 on.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(seen)]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(others)}
