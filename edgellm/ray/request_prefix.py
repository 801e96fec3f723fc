"""What a prompt begins with, by what is in a request: the front has no tokenizer and no template.

Beginnings are named as blocks of the KV cache are (see `prefix_index.py`), but of the texts that a
model reads, in the order in which most templates have them: what the system says, the tools, then
the rest. How they stand in the JSON does not count, nor do other fields: all replicas have one
model, whatever clients call it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

from edgellm.serve.anthropic.messages import BILLING

# Bytes of a piece: about as many tokens as a block of the KV cache has.
_PIECE = 512
# Of one request; what comes behind them is not looked at.
_MOST_BYTES = 256 * _PIECE
_SYSTEM = ("system", "developer")


def request_prefix(fields: Mapping[str, object], *, salt: str = "") -> list[bytes]:
    """The names of the beginnings of what a model reads of a request, shortest first.

    Args:
        fields: of its body, in any dialect.
        salt: only requests with the same one have the same names.
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
    """What the model reads, in order; something as well of what is no request."""
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
    """Who says what; the keys of the rest in one order."""
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
    """Texts as they are, in a list or among other fields of a part; all else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        value = value[:_MOST_BYTES]
        if any(isinstance(item, int | float) for item in value[:1]):  # tokens
            return json.dumps(value)
        texts = (_text(item) for item in value)
        return "".join(text for text in texts if not text.startswith(BILLING))
    if isinstance(value, dict):
        if isinstance(value.get("text"), str) and "type" in value:
            return str(value["text"])
        # which is elsewhere in the next request of a conversation
        value = {name: item for name, item in value.items() if name != "cache_control"}
    return f"{json.dumps(value, ensure_ascii=False, sort_keys=True)} "
