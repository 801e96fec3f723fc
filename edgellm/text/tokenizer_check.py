"""Checks of tokenizer.json for content that the `tokenizers` library does not expect.

The library then ends the process, or writes a trace to the terminal, instead of raising an error.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

# Names of dangerous parts, or a name written with escapes. Encoding runs no TemplateProcessing.
_SUSPECT = re.compile(rb"Precompiled|FixedLength|\\u00[4-7]")


def check_description(content: bytes, *, template: bool) -> None:
    """Refuse a tokenizer.json with parts known to end in a panic or in gigabytes of memory.

    Args:
        template: whether to check the template of begin and end tokens as well, for which the whole
            vocabulary has to be read.

    Raises:
        ValueError: a part is refused; the message names it.
    """
    if template or _SUSPECT.search(content):
        json.loads(content, object_hook=_checked)


def _checked(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "Precompiled":
        _check_charsmap(part.get("precompiled_charsmap"))
    elif kind == "FixedLength" and part.get("length") == 0:
        raise ValueError("a FixedLength pre-tokenizer has the length 0")
    elif kind == "TemplateProcessing":
        _check_template(part)
    return part


def _check_charsmap(text: object) -> None:
    """Compare the trie's size, in the first four bytes, with the bytes that follow."""
    content = base64.b64decode(text) if isinstance(text, str) else b""
    size = int.from_bytes(content[:4], "little")
    if not 4 <= size <= len(content) - 4:
        raise ValueError(
            f"precompiled_charsmap has {len(content)} bytes, and says that {size} of them are its "
            "trie"
        )


def _check_template(part: Mapping[str, Any]) -> None:
    known = part.get("special_tokens")
    for side in (part.get("single"), part.get("pair")):
        for piece in side if isinstance(side, list) else ():
            token = piece.get("SpecialToken") if isinstance(piece, dict) else None
            name = token.get("id") if isinstance(token, dict) else None
            if isinstance(name, str) and not (isinstance(known, dict) and name in known):
                raise ValueError(f"TemplateProcessing has no special token {name!r}")
