"""Conversations as token ids; message text never passes for special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.errors import TemplateError
from edgellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgellm.text.template import ChatTemplate

# Private-use characters bracket the number of a part that the template must carry through as is.
_OPEN, _CLOSE = "\ue0e0", "\ue0e1"


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: system, user or assistant.
        tokens: the tokens of a generated answer; they are used as they are, because encoding
            their text again may give others and so miss the cache.
    """

    role: str
    content: str
    tokens: tuple[int, ...] | None = None


def encode_conversation(
    messages: Sequence[Message], template: ChatTemplate | None, tokenizer: Tokenizer
) -> list[int]:
    """Token ids of a conversation, up to where the answer begins.

    Raises:
        TemplateError: the model has no template, or it does not take these messages.
    """
    if template is None:
        raise TemplateError(
            "this model has no chat template; continue a text without one (`raw`), or take a model "
            "made for chat"
        )
    parts: list[str | tuple[int, ...]] = []
    rendered = template.render(
        [{"role": m.role, "content": _protect(m, tokenizer, parts)} for m in messages]
    )
    ids: list[int] = []
    for i, text in enumerate(rendered.replace(_CLOSE, _OPEN).split(_OPEN)):
        if i % 2 == 0:
            # the begin token stands before a part that the template begins with, too
            if text or (i == 0 and parts):
                ids += tokenizer.encode(text, add_bos=not ids and None, parse_special=True)
            continue
        part = parts[int(text)]
        ids += tokenizer.encode(part, add_bos=False) if isinstance(part, str) else part
    return ids


def _protect(message: Message, tokenizer: Tokenizer, parts: list[str | tuple[int, ...]]) -> str:
    """The content with generated tokens and texts of special tokens replaced by their numbers."""
    if message.tokens is not None:
        return _number(message.tokens, parts)
    content = message.content.replace(_OPEN, "").replace(_CLOSE, "")
    pattern = tokenizer.special_pattern
    return content if pattern is None else pattern.sub(lambda m: _number(m[0], parts), content)


def _number(part: str | tuple[int, ...], parts: list[str | tuple[int, ...]]) -> str:
    parts.append(part)
    return f"{_OPEN}{len(parts) - 1}{_CLOSE}"
