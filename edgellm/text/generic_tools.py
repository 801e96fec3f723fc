"""Tools described in a system prompt, for models whose chat template has no place for tools.

The form is that of Hermes, which most small models have seen in training. Such a model does not
choose a tool by itself, so this form is for answers that a grammar holds to a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from edgellm.text.prompt import Message
from edgellm.text.tool_format import AnswerFormat, CallFormat, ObjectKeys
from edgellm.tool_use import Tool, ToolCall

_PROMPT = """\
You can call these functions. Their signatures are:
<tools>
{tools}
</tools>
To call one, answer with a JSON object with its name and arguments:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""

_CALLS = CallFormat(
    kind="object",
    open="<tool_call>\n",
    close="\n</tool_call>",
    between="\n",
    keys=ObjectKeys(name="name", arguments="arguments"),
)


def generic_format(format: AnswerFormat) -> AnswerFormat:
    """Return an answer format with its tool calls replaced by those of the generic form."""
    return replace(format, calls=_CALLS)


def in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a conversation with tools in its system prompt, and calls and results as text."""
    described = "\n".join(json.dumps(tool.to_json(), ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=described)
    first = messages[0] if messages and messages[0].role in ("system", "developer") else None
    system = prompt if first is None else f"{first.content}\n\n{prompt}"
    rest = messages if first is None else messages[1:]
    return [Message("system", system), *map(_in_words, rest)]


def _in_words(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = "\n".join(map(_call_in_words, message.tool_calls))
    content = f"{message.content}\n{calls}" if message.content else calls
    return Message("assistant", content, message.tokens, reasoning=message.reasoning)


def _call_in_words(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
