"""Names of the beginnings of a request's prompt, for a front without tokenizer and template.

Beginnings are named as blocks of the KV cache are (see `prefix_index.py`), but from the texts that
a model reads, in the order in which most templates have them: system messages, tools, the rest.
The layout of the JSON does not count, nor do other fields: all replicas have one model, whatever
clients call it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

from edgellm.serve.anthropic.messages import BILLING, GIT_STATUS

# Bytes of a piece: about as many tokens as a block of the KV cache has.
_PIECE = 512
# Maximum of bytes of one request that are named; text after them does not count.
_MOST_BYTES = 256 * _PIECE
_SYSTEM = ("system", "developer")


def request_prefix(fields: Mapping[str, object], *, salt: str = "") -> list[bytes]:
    """Name the beginnings of the text that a model reads of a request, shortest first.

    Args:
        fields: fields of the request's body, in any dialect.
        salt: salt of the names; only requests with the same salt share names.
    """
    data = bytearray()
    for text in _read(fields):
        data += text.encode("utf-8", "surrogatepass")
        if len(data) >= _MOST_BYTES:
            break
    names, name = [], hashlib.sha256(salt.encode()).digest()
    for end in range(_PIECE, min(len(data), _MOST_BYTES) + 1, _PIECE):
        name = hashlib.sha256(name + data[end - _PIECE : end]).digest()
        names.append(name)
    return names


def _read(fields: Mapping[str, object]) -> Iterator[str]:
    """Yield the texts that the model reads of a request, in order; wrong requests are accepted."""
    messages = [_message("system", fields.get(name)) for name in ("system", "instructions")]
    for name in ("messages", "input"):
        given = fields.get(name)
        messages += given[:_MOST_BYTES] if isinstance(given, list) else [_message("user", given)]
    first = next((i for i, each in enumerate(messages) if not _is_system(each)), len(messages))
    yield from map(_told, messages[:first])
    for name in ("tools", "input_extra"):
        yield _text(fields.get(name))
    yield from map(_told, messages[first:])
    for name in ("input_prefix", "prompt"):
        yield _text(fields.get(name))


def _message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content} if content else {}


def _is_system(message: object) -> bool:
    return not message or (isinstance(message, dict) and message.get("role") in _SYSTEM)


def _told(message: object) -> str:
    """Return a message as text: role, content, and other fields in alphabetical order."""
    if not message:
        return ""
    if not isinstance(message, dict) or "role" not in message:
        return _text(message)
    role = "system" if message["role"] in _SYSTEM else message["role"]
    more = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and value is not None
    }
    return f"{role}\n{_text(message.get('content'))}{_text(more or None)}\n"


def _text(value: object) -> str:
    """Return a value as text.

    Texts are taken as they are, also in a list or as the `text` of a part; other values as JSON.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        value = value[:_MOST_BYTES]
        if any(isinstance(item, int | float) for item in value[:1]):  # tokens
            return json.dumps(value)
        texts = (_text(item) for item in value)
        system = "".join(text for text in texts if not text.startswith(BILLING))
        return system.partition(GIT_STATUS)[0]
    if isinstance(value, dict):
        if isinstance(value.get("text"), str) and "type" in value:
            return str(value["text"])
        # `cache_control` moves to another part in the next request of a conversation
        value = {name: item for name, item in value.items() if name != "cache_control"}
    return f"{json.dumps(value, ensure_ascii=False, sort_keys=True)} "
