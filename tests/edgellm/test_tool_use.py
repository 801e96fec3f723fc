from __future__ import annotations

from typing import Any

import pytest

from edgellm import OptionError, Tool, ToolCall, ToolCallDelta
from edgellm.tool_use import checked_choice, checked_tools, joined_calls

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def test_a_tool_and_its_json() -> None:
    tool = Tool("weather", "Tell the weather", SCHEMA)
    assert Tool.from_json(tool.to_json()) == tool
    assert Tool.from_json({"name": "weather", "parameters": SCHEMA}).schema == SCHEMA
    assert Tool.from_json({"name": "now", "description": None, "parameters": None}).schema == {
        "type": "object",
        "properties": {},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "1 to 128 letters"),
        (("a b",), "1 to 128 letters"),
        (("a" * 129,), "1 to 128 letters"),
        ((3,), "a text"),
        (("f", None), "a text"),
        (("f", "x" * 70_000), "65536 are allowed"),
        (("f", "", []), "a JSON schema is wanted"),
        (("f", "", {"type": "string"}), 'has to be "object"'),
        (("f", "", {"properties": []}), "no JSON object"),
        (("f", "", {"default": {1, 2}}), "is no JSON"),
        (("f", "", {"default": float("nan")}), "is no JSON"),
        (("f", "", {"default": "x" * 300_000}), "characters of JSON"),
        (("f", "", nested(40)), "nested deeper"),
    ],
)
def test_wrong_tools(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Tool(*arguments)


@pytest.mark.parametrize(
    "value",
    [3, "f", {}, {"type": "function"}, {"type": "retrieval", "function": {"name": "f"}}, [1]],
)
def test_what_is_no_tool(value: object) -> None:
    with pytest.raises(OptionError):
        checked_tools([value])


def test_lists_of_tools() -> None:
    assert checked_tools([Tool("f"), {"name": "g"}]) == (Tool("f"), Tool("g"))
    for wrong in (
        "f",
        {"name": "f"},
        3,
        None,
        [Tool("f")] * 2,
        [Tool(f"f{i}") for i in range(129)],
    ):
        with pytest.raises(OptionError):
            checked_tools(wrong)


def test_tool_choices() -> None:
    tools = (Tool("f"), Tool("g"))
    assert checked_choice("auto", ()) == "auto"
    assert checked_choice("required", tools) == "required"
    assert checked_choice({"type": "function", "function": {"name": "g"}}, tools) == {"name": "g"}
    assert checked_choice({"name": "f"}, tools) == {"name": "f"}
    for wrong in ("any", None, 3, {"name": "h"}, {"function": 3}, {}):
        with pytest.raises(OptionError):
            checked_choice(wrong, tools)
    with pytest.raises(OptionError, match="there are no tools"):
        checked_choice("required", ())


def test_deltas_of_two_calls() -> None:
    deltas = [
        ToolCallDelta(0, "a", "f"),
        ToolCallDelta(0, arguments='{"x"'),
        ToolCallDelta(0, arguments=": 1}"),
        ToolCallDelta(1, "b", "g"),
    ]
    assert joined_calls(deltas) == (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", ""))
