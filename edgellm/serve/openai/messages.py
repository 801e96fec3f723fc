"""Messages, tools and errors in OpenAI's form, which other dialects share in part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from edgellm.errors import OptionError
from edgellm.serve.ask import Conversation
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import JSON
from edgellm.serve.request_error import Kind, RequestError
from edgellm.text.prompt import ROLES, Message
from edgellm.text.template import Scalar
from edgellm.tool_use import MAX_TOOLS, Tool, ToolCall, ToolChoice, checked_choice, checked_tools

T = TypeVar("T")
MAX_MESSAGES = 10_000
_MAX_CALLS = 128
_MAX_ARGUMENTS = 64


def read_conversation(fields: Fields) -> Conversation:
    """Read a chat's `messages`, `tools`, tool options, reasoning effort and template arguments.

    Raises:
        RequestError: a field is wrong, there are no messages, or a message has a part that no
            model here reads, such as an image.
    """
    tools = read_tools(fields.get("tools"))
    choice = read_choice(fields.get("tool_choice"), tools, "tool_choice")
    parallel = fields.flag("parallel_tool_calls")
    return Conversation(
        messages=read_messages(fields),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel is not False,
        template_arguments=_template_arguments(fields),
        template_hints=effort_hints(fields.text("reasoning_effort")),
        reasoning_budget=read_budget(fields),
    )


def effort_hints(effort: str | None) -> dict[str, Scalar]:
    """Return OpenAI's effort of reasoning as variables of the chat template."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def read_budget(fields: Fields) -> int | None:
    """Read the maximum of tokens of reasoning, under any of its names; -1: no limit."""
    for name in ("reasoning_budget", "thinking_budget", "thinking_budget_tokens"):
        value = fields.whole(name, -1, 1 << 31)
        if value is not None:
            return None if value == -1 else value
    return None


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """Read the field `messages`; see `read_conversation`."""
    fields.required("messages", fields.get("messages"))
    messages = tuple(_message(each) for each in fields.objects("messages", MAX_MESSAGES))
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    return messages


def read_tools(value: Any) -> tuple[Tool, ...]:
    """Read a list of OpenAI's tools; null: no tools."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise RequestError(
            "invalid_request", f"`tools` is a list of at most {MAX_TOOLS} tools", param="tools"
        )
    return checked("tools", lambda: checked_tools(value))


def read_choice(value: Any, tools: tuple[Tool, ...], param: str) -> ToolChoice:
    """Read OpenAI's `tool_choice`; null: auto."""
    if value is None:
        return "auto"
    return checked(param, lambda: checked_choice(value, tools))


def checked(param: str, read: Callable[[], T]) -> T:
    """Return the result of `read`; an `OptionError` becomes a `RequestError` about `param`."""
    try:
        return read()
    except OptionError as error:
        raise RequestError("invalid_request", str(error), param=param) from None


def _template_arguments(fields: Fields) -> dict[str, Scalar]:
    """Read the scalars of `chat_template_kwargs`; the template decides which names are allowed."""
    given = fields.object("chat_template_kwargs")
    if given is None:
        return {}
    right = all(v is None or isinstance(v, bool | int | float | str) for v in given.values.values())
    if not right or len(given.values) > _MAX_ARGUMENTS:
        raise fields.wrong("chat_template_kwargs", "an object of texts, numbers, true and false")
    return dict(given.values)


def _message(fields: Fields) -> Message:
    role = fields.required_text("role")
    if role not in ROLES:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}")
    content = content_text(fields, "content")
    if role == "tool":
        return Message(
            role, content, tool_call_id=fields.text("tool_call_id"), name=fields.text("name")
        )
    if role != "assistant":
        return Message(role, content, name=fields.text("name"))
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    calls = tuple(_call(each) for each in fields.objects("tool_calls", _MAX_CALLS))
    return Message(role, content, reasoning=reasoning, tool_calls=calls, name=fields.text("name"))


def _call(fields: Fields) -> ToolCall:
    function = fields.required_object("function")
    return ToolCall(
        fields.text("id") or "", function.required_text("name"), function.text("arguments") or "{}"
    )


def content_text(fields: Fields, name: str) -> str:
    """Read content as one text: a string, null, or a list of text parts."""
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


TYPES: Mapping[Kind, str] = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "internal": "server_error",
    "overloaded": "overloaded_error",
    "unavailable": "unavailable_error",
    "context_length": "exceed_context_size_error",
}


def error_body(error: RequestError) -> JSON:
    return {
        "error": {
            "message": error.message,
            "type": TYPES.get(error.kind, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
            **error.details,
        }
    }
