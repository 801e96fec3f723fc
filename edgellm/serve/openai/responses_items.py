"""Items of OpenAI's responses API, which make up a response and its input."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgellm.serve.events import Delta
from edgellm.serve.http.fields import Fields
from edgellm.serve.openai.messages import MAX_MESSAGES, content_text, read_tools
from edgellm.serve.request_error import RequestError
from edgellm.text.prompt import Message
from edgellm.tool_use import Tool, ToolCall, ToolCallDelta

_ROLES = ("system", "developer", "user", "assistant")


# Tools that OpenAI's servers run. The model is not told of them; a request that offers them can be
# answered without.
_HOSTED = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "mcp",
    "tool_search",
)


@dataclass(frozen=True)
class OfferedTools:
    """Functions that a request offers, also those in namespaces.

    Attributes:
        namespaces: namespace of each tool that has one, and its name there, by the tool's name.
    """

    tools: tuple[Tool, ...] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, listed: Any) -> OfferedTools:
        """Read the field `tools`; null: no tools.

        Raises:
            RequestError: a tool is wrong, or neither a function nor run by the server.
        """
        if not isinstance(listed, list):
            return cls(read_tools(listed))
        functions: list[Any] = []
        namespaces: dict[str, tuple[str, str]] = {}
        for index, tool in enumerate(listed):
            kind = tool.get("type", "function") if isinstance(tool, Mapping) else "function"
            if kind == "namespace":
                for space, name, each in _in_namespace(tool, f"tools[{index}]"):
                    namespaces[f"{space}.{name}"] = (space, name)
                    functions.append({**each, "name": f"{space}.{name}"})
            elif not str(kind).startswith(_HOSTED):
                functions.append(_wrapped(tool, f"tools[{index}]"))
        return cls(read_tools(functions), namespaces)

    def choice(self, fields: Fields) -> Any:
        """Return the field `tool_choice`, with the name that the model knows a tool by."""
        given = fields.get("tool_choice")
        if isinstance(given, Mapping) and isinstance(given.get("namespace"), str):
            return {**given, "name": self.name_of(given["namespace"], str(given.get("name")))}
        return given

    def name_of(self, namespace: str | None, name: str) -> str:
        """Return the name that the model knows a called tool by."""
        full = f"{namespace}.{name}"
        return full if full in self.namespaces else name

    def called(self, name: str) -> dict[str, str]:
        """Return the fields that tell a client which tool was called."""
        if name not in self.namespaces:
            return {"name": name}
        namespace, inner = self.namespaces[name]
        return {"name": inner, "namespace": namespace}


def _in_namespace(
    tool: Mapping[str, Any], where: str
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the namespace, and the name and the fields of each of its functions."""
    space, functions = tool.get("name"), tool.get("tools")
    if not isinstance(space, str) or not space:
        raise _wrong(f"{where}.name", "a string")
    if not isinstance(functions, list):
        raise _wrong(f"{where}.tools", "a list of functions")
    for index, function in enumerate(functions):
        wrapped = _wrapped(function, f"{where}.tools[{index}]")
        fields = wrapped.get("function") if isinstance(wrapped, Mapping) else None
        name = fields.get("name") if isinstance(fields, Mapping) else None
        if not isinstance(fields, Mapping) or not isinstance(name, str):
            raise _wrong(f"{where}.tools[{index}]", "a function with a name")
        yield space, name, fields


def _wrong(param: str, allowed: str) -> RequestError:
    return RequestError("invalid_request", f"`{param}` is wrong; allowed is {allowed}", param=param)


def _wrapped(tool: Any, where: str = "") -> Any:
    """Convert a tool with fields beside its `type` to a chat's form, with fields in `function`."""
    if not isinstance(tool, Mapping):
        return tool
    kind = tool.get("type", "function")
    if kind != "function":
        raise RequestError(
            "not_supported",
            f"`{where}.type` is {str(kind)[:40]!r}; only tools that the client runs, of type "
            "function, can be called",
            param=f"{where}.type",
        )
    if "function" in tool:
        return tool
    return {"type": kind, "function": {key: v for key, v in tool.items() if key != "type"}}


def read_input(fields: Fields, offered: OfferedTools) -> tuple[Message, ...]:
    """Read the conversation of the fields `instructions` and `input`."""
    messages: list[Message] = []
    instructions = fields.text("instructions")
    if instructions:
        messages.append(Message("system", instructions))
    given = fields.required("input", fields.get("input"))
    if isinstance(given, str):
        return (*messages, Message("user", given))
    for item in fields.objects("input", MAX_MESSAGES):
        _add(messages, item, offered)
    if not messages:
        raise fields.wrong("input", "a string, or a list of items")
    return tuple(messages)


def _add(messages: list[Message], item: Fields, offered: OfferedTools) -> None:
    """Add an item; consecutive reasoning, text and tool calls of the assistant are one message."""
    kind = item.text("type") or "message"
    if kind == "message":
        role = item.choice("role", _ROLES)
        text = content_text(item, "content")
        if role == "assistant":
            before = _assistant(messages)
            messages.append(replace(before, content=before.content + text))
        else:
            messages.append(Message(item.required("role", role), text))
    elif kind == "reasoning":
        parts = item.objects("content", MAX_MESSAGES) or item.objects("summary", MAX_MESSAGES)
        text = "".join(part.text("text") or "" for part in parts)
        before = _assistant(messages)
        messages.append(replace(before, reasoning=(before.reasoning or "") + text))
    elif kind == "function_call":
        call = ToolCall(
            item.required_text("call_id"),
            offered.name_of(item.text("namespace"), item.required_text("name")),
            item.text("arguments") or "{}",
        )
        before = _assistant(messages)
        messages.append(replace(before, tool_calls=(*before.tool_calls, call)))
    elif kind == "function_call_output":
        output = content_text(item, "output")
        messages.append(Message("tool", output, tool_call_id=item.required_text("call_id")))
    elif not kind.startswith(_HOSTED):  # calls of tools that are left out
        raise RequestError(
            "not_supported",
            f"`{item.where}type` is {kind[:40]!r}; allowed are message, reasoning, function_call "
            "and function_call_output",
            param=f"{item.where}type",
        )


def _assistant(messages: list[Message]) -> Message:
    """Take the assistant's last message off the list; a new one if the last is another role's."""
    if messages and messages[-1].role == "assistant":
        return messages.pop()
    return Message("assistant", "")


@dataclass
class _Item:
    """An output item that is being written.

    Attributes:
        kind: type of the item: message, reasoning or function_call.
        text: text so far; of a function call, its arguments.
        call: index of a function call in the answer.
        called: see `OfferedTools.called`.
    """

    kind: str
    index: int
    id: str
    text: str = ""
    call: int | None = None
    call_id: str = ""
    called: Mapping[str, str] = field(default_factory=dict)

    def object(self, status: str) -> dict[str, Any]:
        done = status != "in_progress"
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, **self.called, "arguments": self.text}
        content = [self.part()] if done else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


@dataclass
class OutputItems:
    """Output items of an answer that grow with its deltas, and their events.

    Attributes:
        offered: tools of the request.
        done: objects of the closed items.
    """

    offered: OfferedTools
    done: list[dict[str, Any]] = field(default_factory=list)
    _open: _Item | None = None

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Add a delta, and yield the events for it, without their sequence numbers."""
        if delta.reasoning:
            yield from self._text("reasoning", delta.reasoning)
        if delta.text:
            yield from self._text("message", delta.text)
        for call in delta.calls:
            yield from self._call(call)

    def end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Close the open item and yield its events; `status`: "incomplete" if it was cut off."""
        item, self._open = self._open, None
        if item is None:
            return
        if item.kind == "function_call":
            name = "response.function_call_arguments.done"
            yield {"type": name, **item.place, **item.called, "arguments": item.text}
        else:
            place = {**item.place, "content_index": 0}
            extra: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            yield {"type": f"{_TEXTS[item.kind]}.done", **place, "text": item.text, **extra}
            yield {"type": "response.content_part.done", **place, "part": item.part()}
        self.done.append(item.object(status))
        yield {
            "type": "response.output_item.done",
            "output_index": item.index,
            "item": self.done[-1],
        }

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        item = self._open
        assert item is not None
        if not item.text:
            place = {**item.place, "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": item.part()}
        item.text += text
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield {
            "type": f"{_TEXTS[kind]}.delta",
            **item.place,
            "content_index": 0,
            "delta": text,
            **extra,
        }

    def _call(self, call: ToolCallDelta) -> Iterator[dict[str, Any]]:
        if call.name is not None:
            yield from self._begin(
                "function_call",
                call=call.index,
                call_id=call.id or "",
                called=self.offered.called(call.name),
            )
        if call.arguments:
            item = self._open
            assert item is not None
            item.text += call.arguments
            name = "response.function_call_arguments.delta"
            yield {"type": name, **item.place, "delta": call.arguments}

    def _begin(self, kind: str, **values: Any) -> Iterator[dict[str, Any]]:
        yield from self.end()
        id = f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
        self._open = _Item(kind, len(self.done), id, **values)
        yield {
            "type": "response.output_item.added",
            "output_index": self._open.index,
            "item": self._open.object("in_progress"),
        }
