"""Encoding of conversations as token ids; message text never passes for special tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edgellm.errors import OptionError, TemplateError
from edgellm.text.tokenizer import Tokenizer
from edgellm.tool_use import Tool, ToolCall

if TYPE_CHECKING:
    from edgellm.text.template import ChatTemplate, Scalar

ROLES = ("system", "developer", "user", "assistant", "tool")
# Private-use characters around the number of a part that the template must carry through as is.
_OPEN, _CLOSE = "\ue0e0", "\ue0e1"

Part = str | tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: system, developer, user, assistant or tool.
        content: text of the message.
        tokens: token ids of a generated answer; they are used as they are, because encoding their
            text again may give other tokens and so miss the KV cache.
        reasoning: an assistant's reasoning before the content; templates may leave it out.
        tool_calls: an assistant's tool calls.
        tool_call_id: identifier of the call that a tool's result belongs to.
        name: name of the tool, or of the speaker.
    """

    role: str
    content: str
    tokens: tuple[int, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


def check_messages(messages: Sequence[object]) -> None:
    """Refuse a sequence that is no conversation.

    Raises:
        OptionError: a message is wrong; the error tells which, and why.
    """
    for i, message in enumerate(messages):
        if not isinstance(message, Message):
            raise OptionError(f"message {i} is {message!r:.60}; an edgellm.Message is expected")
        if message.role not in ROLES:
            raise OptionError(
                f"message {i} has the role {message.role!r:.60}; allowed are {', '.join(ROLES)}"
            )
        if not isinstance(message.content, str):
            raise OptionError(f"message {i} has the content {message.content!r:.60}, and no text")
        texts = (message.reasoning, message.tool_call_id, message.name)
        if any(not isinstance(text, str | None) for text in texts):
            raise OptionError(f"message {i}: reasoning, tool_call_id and name are texts or None")
        if message.role != "assistant" and (message.tool_calls or message.reasoning is not None):
            raise OptionError(f"message {i}: only an assistant has tool calls and reasoning")
        if message.role != "tool" and message.tool_call_id is not None:
            raise OptionError(f"message {i}: `tool_call_id` is for the role tool")
        if any(not isinstance(call, ToolCall) for call in message.tool_calls):
            raise OptionError(f"message {i}: `tool_calls` are edgellm.ToolCall")


def required_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return the model's chat template.

    Raises:
        TemplateError: the model has none.
    """
    if template is None:
        raise TemplateError(
            "this model has no chat template; continue a text without one (`raw`), or take a model "
            "made for chat"
        )
    return template


def encode_conversation(
    messages: Sequence[Message],
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Tool] = (),
    template_arguments: Mapping[str, Scalar] | None = None,
    continue_last: bool = False,
    check_size: Callable[[int], None] | None = None,
) -> list[int]:
    """Encode a conversation as token ids, up to the beginning of the answer.

    Args:
        tools: tools that the model may call.
        template_arguments: variables that the template reads, such as `enable_thinking`.
        continue_last: whether the answer continues the content of the last message, an assistant's.
        check_size: called with the number of characters of the rendered conversation before they
            are encoded.

    Raises:
        TemplateError: the model has no template, or the template takes no tools or refuses the
            messages.
        OptionError: a message is wrong, or the template does not read one of the arguments.
    """
    check_messages(messages)
    template = required_template(template)
    if tools and not template.traits.takes_tools:
        raise TemplateError(
            "this model's chat template has no place for tools; take a model that was trained to "
            "call them, such as Qwen3"
        )
    if not template.traits.takes_later_system:
        messages = without_later_system(messages)
    writer = _Writer(template, tokenizer)
    values, end = writer.values(messages), ""
    if continue_last:
        end = writer.mark()
        values[-1]["content"] = f"{values[-1]['content'] or ''}{end}"
    rendered = template.render(
        values,
        tools=[writer.protect_all(tool.to_json()) for tool in tools],
        template_arguments={
            name: writer.protect(value) if isinstance(value, str) else value
            for name, value in (template_arguments or {}).items()
        },
        add_generation_prompt=not continue_last,
    )
    if continue_last:
        rendered, shown, _ = rendered.rpartition(end)
        if not shown:
            raise TemplateError(
                "this model's chat template does not show the last answer as it is, so it cannot "
                "be continued; end the conversation with a user's message"
            )
    rendered = writer.with_generated(rendered, messages)
    if check_size is not None:
        check_size(len(rendered))
    return writer.tokens(rendered)


SYSTEM_ROLES = ("system", "developer")


def without_later_system(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which only the first message may be the system's.

    Later ones become a part of the message before them, or of the user's behind them if the one
    before is an answer.
    """
    placed, waiting = list[Message](), list[str]()  # texts that no message has taken in yet
    for message in messages:
        before = placed[-1] if placed else None
        if message.role in SYSTEM_ROLES and before is not None:
            waiting.append(message.content)
            if before.role != "assistant":
                placed[-1] = _with(before, waiting)
        elif waiting and message.role == "user":
            placed.append(replace(message, content="\n\n".join([*waiting, message.content])))
            waiting.clear()
        elif waiting and message.role == "tool":  # a result follows its call
            placed.append(_with(message, waiting))
        else:
            placed += _of_user(waiting)
            placed.append(message)
    return placed + _of_user(waiting)


def _with(message: Message, texts: list[str]) -> Message:
    """Return a message with further texts, which are taken off their list."""
    content = "\n\n".join([message.content, *texts])
    texts.clear()
    return replace(message, content=content)


def _of_user(texts: list[str]) -> list[Message]:
    """Return a message of the user with texts that are taken off their list; none without any."""
    message = Message("user", "\n\n".join(texts))
    messages = [message] if texts else []
    texts.clear()
    return messages


class _Writer:
    """Converter of messages for a chat template, and of the rendered text to token ids.

    Generated tokens and texts of special tokens go through the template as numbers of parts.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._parts: list[Part] = []

    def values(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        return [self._value(message, names) for message in messages]

    def mark(self) -> str:
        """Return a text that marks a place in the prompt and becomes no token."""
        return _number((), self._parts)

    def protect(self, text: str) -> str:
        return _protect(Message("user", text), self._tokenizer, self._parts)

    def protect_all(self, value: Any) -> Any:
        """Return a JSON value with all of its texts protected from passing for special tokens."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect(str(k)): self.protect_all(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect_all(v) for v in value]
        return value

    def with_generated(self, rendered: str, messages: Sequence[Message]) -> str:
        """Replace rendered answers with reasoning or calls by their generated tokens."""
        at = 0
        for message in messages:
            if message.tokens is None or _is_plain(message):
                continue
            text = self._tokenizer.decode(message.tokens, skip_special=False)
            begin = rendered.find(text, at) if text.strip() and _OPEN not in text else -1
            if begin >= 0:
                number = _number(message.tokens, self._parts)
                rendered = rendered[:begin] + number + rendered[begin + len(text) :]
                at = begin + len(number)
        return rendered

    def tokens(self, rendered: str) -> list[int]:
        tokenizer, ids = self._tokenizer, list[int]()
        for i, text in enumerate(rendered.replace(_CLOSE, _OPEN).split(_OPEN)):
            if i % 2 == 0:
                # the begin token also precedes a protected part at the very start of the prompt
                if text or (i == 0 and self._parts):
                    ids += tokenizer.encode(text, add_bos=not ids and None, parse_special=True)
                continue
            part = self._part(text)
            ids += tokenizer.encode(part, add_bos=False) if isinstance(part, str) else part
        return ids

    def _part(self, number: str) -> Part:
        if not (number.isascii() and number.isdigit() and int(number[:9]) < len(self._parts)):
            raise TemplateError(
                "the chat template writes the characters U+E0E0 or U+E0E1, which stand for parts "
                "of a prompt, or it cuts a text that has such parts"
            )
        return self._parts[int(number)]

    def _value(self, message: Message, names: Mapping[str, str]) -> dict[str, Any]:
        role = message.role
        if role == "developer" and not self._template.traits.takes_developer:
            role = "system"
        if _is_plain(message):
            content = _protect(message, self._tokenizer, self._parts)
        else:
            content = self.protect(message.content)
        value: dict[str, Any] = {"role": role, "content": content}
        if message.tool_calls:
            calls = [self._call(call) for call in message.tool_calls]
            value = self._template.traits.call_message(content, calls)
        field = self._template.traits.reasoning_field
        if message.reasoning is not None and field is not None:
            value[field] = self.protect(message.reasoning)
        name = message.name
        if role == "tool" and message.tool_call_id is not None:
            value["tool_call_id"] = self._id(message.tool_call_id)
            name = name or names.get(message.tool_call_id)
        if name is not None:
            value["name"] = self.protect(name)
        return value

    def _call(self, call: ToolCall) -> dict[str, Any]:
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise OptionError(
                f"the call {call.id!r:.60} of {call.name!r:.60} has the arguments "
                f"{call.arguments!r:.60}; a JSON object is expected"
            )
        return {
            "id": self._id(call.id),
            "name": self.protect(call.name),
            "arguments": self.protect_all(arguments),
        }

    def _id(self, text: str) -> str:
        """Return a call's identifier as the template takes it, equal for a call and its result."""
        if not self._template.traits.short_ids or (len(text) == 9 and text.isalnum()):
            return self.protect(text)
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _is_plain(message: Message) -> bool:
    """Whether a message has content alone, without reasoning or tool calls."""
    return message.reasoning is None and not message.tool_calls


def _protect(message: Message, tokenizer: Tokenizer, parts: list[Part]) -> str:
    """Return the content with generated tokens and special tokens' texts replaced by numbers."""
    if message.tokens is not None:
        return _number(message.tokens, parts)
    content = message.content.replace(_OPEN, "").replace(_CLOSE, "")
    pattern = tokenizer.special_pattern
    return content if pattern is None else pattern.sub(lambda m: _number(m[0], parts), content)


def _number(part: Part, parts: list[Part]) -> str:
    parts.append(part)
    return f"{_OPEN}{len(parts) - 1}{_CLOSE}"
