"""Messages and tool calls in Ollama's form: arguments are objects, and results name the tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgellm.serve.ask import Conversation
from edgellm.serve.http.fields import Fields
from edgellm.serve.ollama.options import refuse, thinking_hints
from edgellm.serve.openai.messages import MAX_MESSAGES, read_choice, read_tools
from edgellm.text.prompt import ROLES, Message
from edgellm.tool_use import ToolCall, ToolCallDelta

_MAX_CALLS = 128
_NO_IMAGES = "the models here read texts alone"


def read_conversation(fields: Fields) -> Conversation:
    """Read the fields `messages`, `tools`, `think`, and `tool_choice` in OpenAI's form.

    Raises:
        RequestError: one of the fields is wrong.
    """
    tools = read_tools(fields.get("tools"), "tools")
    return Conversation(
        messages=_messages(fields.objects("messages", MAX_MESSAGES)),
        tools=tools,
        tool_choice=read_choice(fields.get("tool_choice"), tools, "tool_choice"),
        template_hints=thinking_hints(fields),
    )


def refuse_images(fields: Fields) -> None:
    """Refuse a request or message with images."""
    refuse(fields, "images", _NO_IMAGES)


def _messages(given: list[Fields]) -> tuple[Message, ...]:
    messages: list[Message] = []
    waiting: list[ToolCall] = []  # calls that have no result yet
    for fields in given:
        message = _message(fields, waiting)
        if message.role == "assistant":
            waiting = list(message.tool_calls)
        messages.append(message)
    return tuple(messages)


def _message(fields: Fields, waiting: list[ToolCall]) -> Message:
    role = fields.required_text("role")
    if role not in ROLES:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}")
    refuse_images(fields)
    content = fields.text("content") or ""
    if role == "assistant":
        calls = [_call(each, i) for i, each in enumerate(fields.objects("tool_calls", _MAX_CALLS))]
        return Message(
            role, content, reasoning=fields.text("thinking") or None, tool_calls=tuple(calls)
        )
    if role == "tool":
        name = fields.text("tool_name") or fields.text("name")
        id = fields.text("tool_call_id") or _answered(waiting, name)
        return Message(role, content, tool_call_id=id, name=name)
    return Message(role, content)


def _answered(waiting: list[ToolCall], name: str | None) -> str | None:
    """Remove the first waiting call that a result without an id can belong to; return its id."""
    call = next((call for call in waiting if name in (None, call.name)), None)
    if call is None:
        return None
    waiting.remove(call)
    return call.id


def _call(fields: Fields, index: int) -> ToolCall:
    function = fields.required("function", fields.object("function"))
    assert isinstance(function, Fields)
    arguments = function.object("arguments")
    text = json.dumps({} if arguments is None else arguments.values, ensure_ascii=False)
    return ToolCall(fields.text("id") or f"call_{index}", function.required_text("name"), text)


class CallCollector:
    """Tool calls put together from deltas, each returned when it is complete.

    `add` and `finish` return call objects in Ollama's form, and a text. The text has the name and
    arguments of a call whose arguments are no JSON object: the answer was cut off in the call, or
    the model got its arguments wrong.
    """

    def __init__(self) -> None:
        self._deltas: list[ToolCallDelta] = []
        self._index = 0

    def add(self, deltas: Sequence[ToolCallDelta]) -> tuple[list[dict[str, Any]], str]:
        """Add deltas, and return the calls that are complete because another one has begun."""
        objects, text = list[dict[str, Any]](), ""
        for delta in deltas:
            if delta.name is not None:
                complete, wrong = self.finish()
                objects += complete
                text += wrong
            self._deltas.append(delta)
        return objects, text

    def finish(self) -> tuple[list[dict[str, Any]], str]:
        """Return the last call, to which no delta will follow."""
        if not self._deltas:
            return [], ""
        first, *others = self._deltas
        self._deltas = []
        name, text = first.name or "", "".join(delta.arguments for delta in others)
        try:
            arguments = json.loads(text or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return [], f'{{"name": {json.dumps(name)}, "arguments": {text}'
        function = {"index": self._index, "name": name, "arguments": arguments}
        self._index += 1
        return [{"id": first.id, "function": function}], ""
