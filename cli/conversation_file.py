"""Conversations in files: a JSON list of `{"role": ..., "content": ...}`, in UTF-8."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgellm import Message
from edgellm.errors import OptionError
from edgellm.store.home import replacing_file

_ROLES = ("system", "user", "assistant")
# Far above any conversation that fits into a context.
_MAX_BYTES = 64 << 20


def write_conversation(name: str, messages: Sequence[Message]) -> None:
    """Write a conversation to a file, whole or not at all.

    Raises:
        OptionError: the name is empty, or the file cannot be written.
    """
    path = _path(name)
    if not path.parent.is_dir():
        raise OptionError(f"{path}: there is no folder {path.parent}; make it first")
    values = [_value(message) for message in messages]
    try:
        with replacing_file(path, private=True) as partial:
            text = json.dumps(values, ensure_ascii=False, indent=1)
            partial.write_text(text + "\n", encoding="utf-8", errors="replace")
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None


def read_conversation(name: str) -> list[Message]:
    """Read a conversation that `write_conversation` wrote, or any file of the same form.

    Raises:
        OptionError: the name is empty, or the file cannot be read or has another form.
    """
    path = _path(name)
    wrong = OptionError(
        f"{path}: not a conversation saved with /save; it is a JSON list of messages with a role "
        f"({', '.join(_ROLES)}) and a content"
    )
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= _MAX_BYTES):
            raise wrong
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, list):
            raise wrong
        messages = [_message(value) for value in values]
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None
    except OptionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise wrong from None
    if any(
        m.role not in _ROLES
        or not isinstance(m.content, str)
        or not isinstance(m.reasoning, str | None)
        for m in messages
    ):
        raise wrong
    return messages


def _value(message: Message) -> dict[str, str]:
    value = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        value["reasoning_content"] = message.reasoning
    return value


def _message(value: Mapping[str, str]) -> Message:
    reasoning = value.get("reasoning_content") if value["role"] == "assistant" else None
    return Message(value["role"], value["content"], reasoning=reasoning)


def _path(name: str) -> Path:
    if not name or "\0" in name:
        raise OptionError("name a file")
    try:
        return Path(name).expanduser()
    except RuntimeError:  # `~name` of an unknown user
        raise OptionError(f"{name}: there is no such user") from None
