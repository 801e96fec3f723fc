"""Messages as OpenAI writes them, and other dialects after it."""

from __future__ import annotations

from edgellm.serve.body import Fields
from edgellm.serve.request_error import RequestError
from edgellm.text.prompt import Message

MAX_MESSAGES = 10_000
_ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """The field `messages`.

    Raises:
        RequestError: there are none, or one is of a kind that no model here reads.
    """
    fields.required("messages", fields.get("messages"))
    messages = tuple(_message(each) for each in fields.objects("messages", MAX_MESSAGES))
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return messages


def _message(fields: Fields) -> Message:
    role = fields.required_text("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    return Message(_ROLES[role], content_text(fields, "content"))


def content_text(fields: Fields, name: str) -> str:
    """A string, null, or a list of parts that are texts."""
    content = fields.get(name)
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise fields.wrong(name, "a string, or a list of parts")
    return "".join(_part(part) for part in fields.objects(name, MAX_MESSAGES))


def _part(part: Fields) -> str:
    kind = part.text("type") or "text"
    if kind in ("text", "input_text", "output_text", "refusal"):
        return part.required_text("refusal" if kind == "refusal" else "text")
    raise RequestError(
        "not_supported",
        f"`{part.where}type` is {kind[:40]!r}; the models here read texts alone",
        param=f"{part.where}type",
    )
