"""Messages, tools and tool calls in Anthropic's form: content is a list of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgellm.serve.ask import Conversation
from edgellm.serve.http.fields import Fields
from edgellm.serve.openai.messages import MAX_MESSAGES, checked
from edgellm.serve.request_error import RequestError
from edgellm.text.prompt import Message
from edgellm.text.template import Scalar
from edgellm.tool_use import MAX_TOOLS, Tool, ToolCall, ToolChoice, checked_choice, checked_tools

_MAX_BLOCKS = 10_000
_ROLES = ("user", "assistant", "system")
# Beginning of Claude Code's first system block, which is left out: it differs with each request, so
# no prefix behind it would be found in the KV cache.
BILLING = "x-anthropic-billing-header:"
# Beginning of the end of Claude Code's last system block: it differs with each change of the files,
# and most templates have the tools, 15,000 tokens, behind the system prompt.
GIT_STATUS = "\n\ngitStatus: "


def read_conversation(fields: Fields) -> Conversation:
    """Read `system`, `messages`, `tools`, `tool_choice`, `thinking` and the effort of a request.

    Raises:
        RequestError: a field is wrong, or asks for what no model here can do, such as images.
    """
    fields.required("messages", fields.get("messages"))
    system, status = _system(fields)
    messages = [Message("system", system)] if system else []
    for each in fields.objects("messages", MAX_MESSAGES):
        messages += _messages(each)
    if all(message.role == "system" for message in messages):
        raise fields.wrong("messages", "a list with a message of the user")
    if status:
        messages = _before_the_question(f"{GIT_STATUS.strip()} {status}", messages)
    tools = _tools(fields)
    choice, parallel = _choice(fields, tools)
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        template_hints=_thinking(fields),
        reasoning_budget=_budget(fields),
    )


def _system(fields: Fields) -> tuple[str, str]:
    """Read the system prompt, and the git status at the end of its last block."""
    if not isinstance(fields.get("system"), list):
        return fields.text("system") or "", ""
    texts = [_text(block) for block in fields.objects("system", _MAX_BLOCKS)]
    texts = [text for text in texts if not text.startswith(BILLING)]
    last, _, status = texts.pop().rpartition(GIT_STATUS) if texts else ("", "", "")
    return "\n\n".join([*texts, last or status]), status if last else ""


def _before_the_question(text: str, messages: Sequence[Message]) -> list[Message]:
    """Put a text that differs from one conversation to the next before the first question."""
    at = next((i for i, each in enumerate(messages) if each.role == "user"), None)
    if at is None:
        return [Message("system", text), *messages]
    first = replace(messages[at], content=f"{text}\n\n{messages[at].content}")
    return [*messages[:at], first, *messages[at + 1 :]]


def _messages(fields: Fields) -> list[Message]:
    """Convert a message of the request to one or more messages.

    Tool results become messages of their own, before the user's text beside them.
    """
    role = fields.required_text("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    content = fields.required("content", fields.get("content"))
    if isinstance(content, str):
        return [Message(role, content)]
    if not isinstance(content, list):
        raise fields.wrong("content", "a string, or a list of blocks")
    blocks = fields.objects("content", _MAX_BLOCKS)
    if role == "assistant":
        return [_answer(blocks)]
    results = [_result(block) for block in blocks if block.text("type") == "tool_result"]
    texts = [_text(block) for block in blocks if block.text("type") != "tool_result"]
    if texts or not results:
        results.append(Message(role, "\n\n".join(texts)))
    return results


def _answer(blocks: Sequence[Fields]) -> Message:
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for block in blocks:
        kind = block.text("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind != "redacted_thinking":  # encrypted: only its author can read it
            texts.append(_text(block))
    reasoning = "\n\n".join(thought for thought in thoughts if thought) or None
    content = "\n\n".join(texts)
    return Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls))


def _call(block: Fields) -> ToolCall:
    text = block.object_text("input")
    return ToolCall(block.required_text("id"), block.required_text("name"), text)


def _result(block: Fields) -> Message:
    id = block.required_text("tool_use_id")
    if isinstance(block.get("content"), list):
        parts = [_text(part) for part in block.objects("content", _MAX_BLOCKS)]
        text = "\n\n".join(parts)
    else:
        text = block.text("content") or ""
    if block.flag("is_error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=id)


def _text(block: Fields) -> str:
    """Return the text of a text block, or of a document that is plain text."""
    kind = block.required_text("type")
    if kind == "text":
        return block.required_text("text")
    source = block.object("source") if kind == "document" else None
    if source is not None and source.text("type") == "text":
        return source.required_text("data")
    raise RequestError(
        "not_supported",
        f"`{block.where}type` is {kind[:40]!r}; the models here read texts alone",
        param=f"{block.where}type",
    )


def _tools(fields: Fields) -> tuple[Tool, ...]:
    given: list[Mapping[str, Any]] = []
    for tool in fields.objects("tools", MAX_TOOLS):
        kind = tool.text("type")
        if kind not in (None, "custom"):
            raise RequestError(
                "not_supported",
                f"`{tool.where}type` is {str(kind)[:40]!r}; only tools that the client runs can be "
                "called",
                param=f"{tool.where}type",
            )
        given.append(
            {
                "parameters": tool.required_object("input_schema").values,
                "name": tool.required_text("name"),
                "description": tool.text("description"),
            }
        )
    return checked("tools", lambda: checked_tools(given))


def _choice(fields: Fields, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """Read the tool choice, and whether one answer may have several tool calls."""
    given = fields.object("tool_choice")
    if given is None:
        return "auto", True
    kind = given.choice("type", ("auto", "any", "tool", "none")) or "auto"
    choice: object = {"any": "required", "tool": {"name": given.get("name")}}.get(kind, kind)
    parallel = not given.flag("disable_parallel_tool_use")
    return checked("tool_choice", lambda: checked_choice(choice, tools)), parallel


def _budget(fields: Fields) -> int | None:
    given = fields.object("thinking")
    return None if given is None else given.whole("budget_tokens", 0, 1 << 31)


def _thinking(fields: Fields) -> dict[str, Scalar]:
    """Read template hints: the effort, and `enable_thinking`, which is false unless asked for."""
    config = fields.object("output_config")
    effort = None if config is None else config.text("effort")
    hints: dict[str, Scalar] = {} if effort is None else {"reasoning_effort": effort}
    given = fields.object("thinking")
    kind = None if given is None else given.choice("type", ("enabled", "adaptive", "disabled"))
    return {**hints, "enable_thinking": kind in ("enabled", "adaptive")}
