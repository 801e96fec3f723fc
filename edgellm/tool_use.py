"""Tools that a model may call, and its calls: OpenAI's terms.

A tool is described by a JSON schema of its parameters; a call names it and has arguments as JSON
text. The form in which a model writes calls follows from its chat template, see
`text/tool_format.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from edgellm.checks import check_references, check_text, shown
from edgellm.errors import OptionError

# A mapping {"name": NAME} chooses the tool of that name.
ToolChoice = Literal["auto", "none", "required"] | Mapping[str, str]

MAX_TOOLS = 128
MAX_SCHEMA_CHARACTERS = 1 << 18
MAX_DESCRIPTION_CHARACTERS = 1 << 16
_MAX_DEPTH = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask for.

    Attributes:
        name: letters, digits, `_`, `-` and `.`, at most 128.
        description: text for the model that says when to call the tool.
        parameters: JSON schema of type object; empty: the tool has no parameters.

    Raises:
        OptionError: a value is not allowed.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values, which a client may have sent."""
        check_text("name", self.name)
        if not _NAME.fullmatch(self.name):
            raise OptionError(
                f"tool {self.name[:60]!r}: a name has 1 to 128 letters, digits, `_`, `-` and `.`"
            )
        check_text("description", self.description)
        if len(self.description) > MAX_DESCRIPTION_CHARACTERS:
            raise OptionError(
                f"tool {self.name}: the description has {len(self.description)} characters; "
                f"{MAX_DESCRIPTION_CHARACTERS} are allowed"
            )
        _check_schema(self.name, self.parameters)

    @classmethod
    def from_json(cls, value: object) -> Tool:
        """Return the tool of OpenAI's `{"type": "function", "function": {...}}`.

        Args:
            value: OpenAI's object, or the object of its `function` alone.

        Raises:
            OptionError: a value that is no tool.
        """
        function = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise OptionError(
                'a tool is {"type": "function", "function": {"name": ..., "description": ..., '
                f'"parameters": {{...}}}}}}; this is {shown(value)}'
            )
        kind = value.get("type", "function") if isinstance(value, Mapping) else None
        if "function" in value and kind != "function":  # type: ignore[operator]
            raise OptionError(f"a tool of type {shown(kind)}; only functions can be called")
        description, parameters = function.get("description"), function.get("parameters")
        return cls(
            function["name"],
            "" if description is None else description,
            {} if parameters is None else parameters,
        )

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's object, as `from_json` reads it, always with the schema of an object."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.schema,
            },
        }

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return {"type": "object", "properties": {}, **self.parameters}


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the model made.

    Attributes:
        id: id of the call, by which the tool's result names it.
        name: name of the tool.
        arguments: JSON text; incomplete if the answer was cut off.
    """

    id: str
    name: str
    arguments: str = "{}"

    @property
    def complete(self) -> bool:
        """Whether the arguments are a JSON object."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False

    def to_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of a tool call, as it is streamed.

    Attributes:
        index: number of the call in its answer, from 0.
        id, name: id of the call and name of the tool in the call's first delta, which has no
            arguments; else None.
        arguments: fragment of JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolArguments(TypedDict, total=False):
    """Arguments for the tool calls and the reasoning of a chat's answers, and for the template.

    tools: tools that the model may call: `Tool`s, or OpenAI's function objects.
    tool_choice: "auto": the model chooses; "none": no call; "required": a call in any case;
        {"name": NAME}: one call of the tool of this name.
    parallel_tool_calls: whether one answer may have several calls.
    template_arguments: variables of the chat template, such as {"enable_thinking": False}.
    reasoning_budget: maximum of tokens of reasoning, after which its end is forced; None: no limit.
        It has no effect on a model that does not reason.
    """

    tools: Sequence[Tool | Mapping[str, object]]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    template_arguments: Mapping[str, bool | int | float | str | None]
    reasoning_budget: int | None


def joined_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Join deltas to the tool calls that they are parts of."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(ToolCall(delta.id or "", delta.name, ""))
        else:
            last = calls[delta.index]
            calls[delta.index] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    return tuple(calls)


def checked_tools(tools: object) -> tuple[Tool, ...]:
    """Return the tools of a list of `Tool` and of OpenAI's JSON objects.

    Raises:
        OptionError: a value that is no tool, two tools of one name, or too many tools.
    """
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise OptionError(f"`tools` is {shown(tools)}; a list of tools is expected")
    if len(tools) > MAX_TOOLS:
        raise OptionError(f"`tools` has {len(tools)}; at most {MAX_TOOLS} are allowed")
    checked = tuple(tool if isinstance(tool, Tool) else Tool.from_json(tool) for tool in tools)
    names = [tool.name for tool in checked]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise OptionError(f"`tools` has the name {min(twice)!r} twice; each tool needs its own")
    return checked


def checked_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Return a tool choice as text, or as `{"name": NAME}`.

    Args:
        choice: a tool choice, or OpenAI's `{"type": "function", "function": {"name": NAME}}`.

    Raises:
        OptionError: a value that is no tool choice, or names no tool of `tools`.
    """
    if isinstance(choice, str) and choice in _CHOICES:
        if choice == "required" and not tools:
            raise OptionError("`tool_choice` is 'required', but there are no tools; give `tools`")
        return choice  # type: ignore[return-value]
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise OptionError(
            f"`tool_choice` is {shown(choice)}; allowed are {', '.join(_CHOICES)} and "
            '{"name": ...} with the name of a tool'
        )
    if all(tool.name != name for tool in tools):
        names = ", ".join(tool.name for tool in tools) or "none"
        raise OptionError(f"`tool_choice` names the tool {name!r}; the tools are: {names}")
    return {"name": name}


def _check_schema(name: str, schema: object) -> None:
    if not isinstance(schema, Mapping):
        raise OptionError(f"tool {name}: `parameters` is {shown(schema)}; a JSON schema is wanted")
    if schema.get("type", "object") != "object":
        raise OptionError(
            f"tool {name}: `parameters` is a schema of type {shown(schema['type'])}; arguments "
            'have names, so it has to be "object"'
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(key, str) for key in properties):
        raise OptionError(f"tool {name}: `properties` is no JSON object")
    if _depth(schema) > _MAX_DEPTH:
        raise OptionError(
            f"tool {name}: `parameters` is nested deeper than {_MAX_DEPTH} levels; make it flatter"
        )
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise OptionError(f"tool {name}: `parameters` is no JSON: {error}") from None
    check_references(f"tool {name}: `parameters`", schema)
    if size > MAX_SCHEMA_CHARACTERS:
        raise OptionError(
            f"tool {name}: `parameters` has {size} characters of JSON; "
            f"{MAX_SCHEMA_CHARACTERS} are allowed"
        )


def _depth(value: object) -> int:
    """Count the levels of nested lists and objects, up to one level more than is allowed."""
    levels, inner = 0, [value]
    while inner and levels <= _MAX_DEPTH:
        nested = [v for v in inner if isinstance(v, Mapping | list | tuple)]
        inner = [i for v in nested for i in (v.values() if isinstance(v, Mapping) else v)]
        levels += bool(nested)
    return levels
