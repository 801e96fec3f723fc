"""Traits of a chat template for tools, tool calls and reasoning, found by rendering probes.

Templates take the same message in different forms: arguments as an object or as JSON text, empty or
null content beside calls, identifiers of nine characters. Each probe
renders a call with names that occur nowhere else, and looks for them in the prompt.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

from edgellm.errors import TemplateError

# Fields of an assistant's message from which templates take the reasoning, the usual one first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# An identifier like those of OpenAI, and one like those of Mistral.
_IDS = ("call_edgellm00a", "edgeLLM0a")

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "edge_listed",
        "description": "A probe",
        "parameters": {
            "type": "object",
            "properties": {"edge_field": {"type": "string", "description": "A field"}},
            "required": ["edge_field"],
        },
    },
}
PROBE_USER: Mapping[str, Any] = {"role": "user", "content": "edge question"}
_PROBE_NAME, _PROBE_KEY, _PROBE_VALUE = "edge_called", "edge_key", "edge value"


class Render(Protocol):
    """The signature of `ChatTemplate.render`."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TemplateTraits:
    """Forms in which a chat template takes tools, tool calls and reasoning.

    Attributes:
        takes_tools: whether the template writes tools into the prompt.
        renders_calls: reason why the template does not render calls; None if it does.
        arguments_as_text: whether a call's arguments are JSON text instead of an object.
        null_content: whether a message with calls alone has the content null instead of "".
        short_ids: whether a call's identifier must have nine letters and digits.
        reasoning_field: field of a message with an answer's reasoning; None if there is none.
        takes_developer: whether the template knows the role `developer`; else `system` is used.
        takes_later_system: whether the template writes a system message behind the user's.
    """

    takes_tools: bool
    renders_calls: str | None
    arguments_as_text: bool = False
    null_content: bool = False
    short_ids: bool = False
    reasoning_field: str | None = None
    takes_developer: bool = False
    takes_later_system: bool = True

    def call_message(self, content: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make an assistant's message with calls `{"id", "name", "arguments": object}`."""
        return {
            "role": "assistant",
            "content": None if self.null_content and not content else content,
            "tool_calls": [self._call(call) for call in calls],
        }

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["arguments"]
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call["name"], "arguments": arguments}
        return {"id": call["id"], "type": "function", "function": function}


def probe_traits(render: Render, source: str) -> TemplateTraits:
    """Find the traits of a chat template.

    Args:
        render: function that renders the template.
        source: text of the template, searched for fields of messages.
    """
    fields = (f for f in _REASONING_FIELDS if re.search(rf"(?:\.|\[['\"]|get\(['\"]){f}\b", source))
    plain, listing = (_rendered(render, [PROBE_USER], tools=tools) for tools in ((), (PROBE_TOOL,)))
    takes_tools = listing is not None and listing != plain and "edge_listed" in listing
    common = {
        "takes_tools": takes_tools,
        "reasoning_field": next(fields, None),
        "takes_developer": _takes_developer(render, source),
        "takes_later_system": _takes_later_system(render),
    }
    # identifiers of nine characters, and arguments as text, are for templates that take no others
    for short, as_text in itertools.product((False, True), repeat=2):
        rendering: list[tuple[int, TemplateTraits]] = []
        for null in (False, True):
            traits = TemplateTraits(
                **common,  # type: ignore[arg-type]
                renders_calls=None,
                arguments_as_text=as_text,
                null_content=null,
                short_ids=short,
            )
            rendered = _rendered_call(render, traits)
            if rendered is not None:
                rendering.append((len(rendered), traits))
        if rendering:
            return min(rendering, key=itemgetter(0))[1]
    reason = "the chat template does not render tool calls"
    return TemplateTraits(**common, renders_calls=reason)  # type: ignore[arg-type]


def _takes_developer(render: Render, source: str) -> bool:
    if re.search(r"['\"]developer['\"]", source) is None:
        return False
    message = {"role": "developer", "content": _PROBE_VALUE}
    return _PROBE_VALUE in (_rendered(render, [message, PROBE_USER], tools=()) or "")


def _takes_later_system(render: Render) -> bool:
    """Whether a system message is rendered behind the user's and behind an answer, and the first
    one beside it."""
    first, later = ({"role": "system", "content": text} for text in (_PROBE_KEY, _PROBE_VALUE))
    answered = [PROBE_USER, {"role": "assistant", "content": "edge answer"}]
    alone = _rendered(render, [first, PROBE_USER], tools=())
    kept = _PROBE_KEY if alone is not None and _PROBE_KEY in alone else ""
    for messages in ([PROBE_USER, later], [*answered, later, PROBE_USER]):
        behind = _rendered(render, messages, tools=())
        both = _rendered(render, [first, *messages], tools=()) if kept else behind
        if not all(text and _PROBE_VALUE in text for text in (behind, both)):
            return False
        if both is None or kept not in both:
            return False
    return True


def _rendered_call(render: Render, traits: TemplateTraits) -> str | None:
    """Render a conversation with a call; None if name or arguments do not appear as they are."""
    call = {
        "id": _IDS[traits.short_ids],
        "name": _PROBE_NAME,
        "arguments": {_PROBE_KEY: _PROBE_VALUE},
    }
    message = traits.call_message("", [call])
    text = _rendered(render, [PROBE_USER, message], tools=(PROBE_TOOL,), prompt=False)
    if text is None or _PROBE_NAME not in text or _PROBE_VALUE not in text:
        return None
    # Python's own notation of a dict, and JSON text inside a JSON text
    wrong = (f"{{'{_PROBE_KEY}'", f'\\"{_PROBE_KEY}', f'"{{"{_PROBE_KEY}', f'{{{{"{_PROBE_KEY}')
    return None if any(form in text for form in wrong) else text


def _rendered(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]],
    prompt: bool = True,
) -> str | None:
    try:
        return render(messages, tools=tools, add_generation_prompt=prompt)
    except TemplateError:
        return None
