"""Messages and calls as Ollama writes them: arguments are objects, and results name the tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgellm.serve.ask import Conversation
from edgellm.serve.body import Fields
from edgellm.serve.ollama_options import refuse, thinking_hints
from edgellm.serve.openai_messages import MAX_MESSAGES, read_choice, read_tools
from edgellm.text.prompt import ROLES, Message
from edgellm.tool_use import ToolCall, ToolCallDelta, joined_calls

_MAX_CALLS = 128
_NO_IMAGES = "the models here read texts alone"


def read_conversation(fields: Fields) -> Conversation:
    """The fields `messages`, `tools` and `think`; `tool_choice` is as OpenAI has it.

    Raises:
        RequestError: one of them cannot be read.
    """
    tools = read_tools(fields.get("tools"), "tools")
    return Conversation(
        messages=_messages(fields.objects("messages", MAX_MESSAGES)),
        tools=tools,
        tool_choice=read_choice(fields.get("tool_choice"), tools, "tool_choice"),
        template_hints=thinking_hints(fields),
    )


def refuse_images(fields: Fields) -> None:
    """Refuse pictures."""
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
    """The id of the first call that a result without an id can be to."""
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
    """Calls that come in parts; they are told when they are complete."""

    def __init__(self) -> None:
        self._deltas: list[ToolCallDelta] = []
        self._told = 0

    def add(self, deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
        """The calls that are complete because the next one has begun."""
        self._deltas += deltas
        calls = joined_calls(self._deltas)
        return self._tell(calls[self._told : -1])

    def finish(self) -> tuple[list[dict[str, Any]], str]:
        """The last call, or what there is of it, as text, if the answer was cut off in it."""
        calls = joined_calls(self._deltas)[self._told :]
        try:
            return self._tell(calls), ""
        except ValueError:
            call = calls[-1]
            return [], f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}'

    def _tell(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        told = [_call_object(call, self._told + i) for i, call in enumerate(calls)]
        self._told += len(told)
        return told


def _call_object(call: ToolCall, index: int) -> dict[str, Any]:
    arguments = json.loads(call.arguments or "{}")
    return {
        "id": call.id,
        "function": {"index": index, "name": call.name, "arguments": arguments},
    }
