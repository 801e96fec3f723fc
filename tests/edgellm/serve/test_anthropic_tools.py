"""Tool calls and thinking, as Anthropic's own client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from calling import TOOLS, Dictated, assert_valid, tool_template
from serving import Running

from edgellm import LLM

TOOL_PARAMS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": {"type": "object", **tool["function"]["parameters"]},
    }
    for tool in TOOLS
]
MESSAGES: Any = [{"role": "user", "content": "go"}]
ASKED: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOL_PARAMS, "max_tokens": 200}
TEXT = (
    "<think>Let me see.</think>So."
    '<call>{"name": "turn", "arguments": {"on": true}}</call>'
    '<call>{"name": "move", "arguments": {"to": "x"}}</call>'
)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def with_tools(tiny: LLM) -> Iterator[None]:
    with tool_template(tiny):
        yield


@pytest.fixture
def dictate(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the model says where JSON is asked for."""

    def say(text: str) -> dict[str, Any]:
        monkeypatch.setattr(LLM, "grammar_filter", lambda *_: Dictated(tiny, text))
        schema = {"type": "object", "additionalProperties": False, "properties": {}}
        return {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}}}

    return say


def test_thoughts_text_and_calls_are_blocks(client: anthropic.Anthropic, dictate: Any) -> None:
    asked = dictate(TEXT)
    whole = client.messages.create(**asked)
    thought, text, turn, move = whole.content
    assert thought.thinking == "Let me see."
    assert text.text == "So."
    assert (turn.name, turn.input, move.name, move.input) == (
        "turn",
        {"on": True},
        "move",
        {"to": "x"},
    )
    assert turn.id != move.id
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    shown = [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content]
    assert shown == [block.model_dump(exclude={"id"}) for block in whole.content]


def test_the_order_of_events(client: anthropic.Anthropic, dictate: Any) -> None:
    """Each block begins, grows and ends before the next one begins."""
    with client.messages.create(**dictate(TEXT), stream=True) as stream:
        events: list[Any] = list(stream)
    assert events[0].type == "message_start"
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks = events[1:-2]
    order = [(event.index, event.type.removeprefix("content_block_")) for event in blocks]
    assert order == sorted(
        order, key=lambda one: (one[0], ["start", "delta", "stop"].index(one[1]))
    )
    starts = [event.content_block.type for event in blocks if event.type == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [
        {event.delta.type for event in blocks if event.index == i and event.type.endswith("delta")}
        for i in range(4)
    ]
    kinds = ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"]
    assert deltas == [{kind} for kind in kinds]
    arguments = "".join(
        event.delta.partial_json
        for event in blocks
        if event.index == 2 and event.type == "content_block_delta"
    )
    assert json.loads(arguments) == {"on": True}


def test_a_round_trip(client: anthropic.Anthropic, dictate: Any, server: Running) -> None:
    answer = client.messages.create(**dictate(TEXT))
    turn, move = answer.content[2:]
    results: Any = [
        {"type": "tool_result", "tool_use_id": turn.id, "content": "it is on"},
        {
            "type": "tool_result",
            "tool_use_id": move.id,
            "content": [{"type": "text", "text": "no"}],
            "is_error": True,
        },
        {"type": "text", "text": "and now?"},
    ]
    content: Any = [block.model_dump(exclude_none=True) for block in answer.content]
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
    ]
    counted = client.messages.count_tokens(model="tiny", messages=history, tools=TOOL_PARAMS)
    prompt = f"<|user|>u:go\n<|user|>a:{TEXT}\n<|user|>t:it is on\n<|user|>t:Error: no\n"
    prompt += "<|user|>u:and now?\n<|user|>a:"
    tokens = server.llm.engine.tokenizer.encode("turn move " + prompt, parse_special=True)
    assert counted.input_tokens == len(tokens)
    reply = client.messages.create(
        model="tiny",
        messages=history,
        tools=TOOL_PARAMS,
        tool_choice={"type": "none"},
        max_tokens=3,
    )
    assert all(block.type != "tool_use" for block in reply.content)
    cached = reply.usage.cache_read_input_tokens
    assert cached is not None
    assert reply.usage.input_tokens + cached == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "move"}])
def test_a_call_is_made_where_one_is_required(
    client: anthropic.Anthropic, choice: Any, stream: bool
) -> None:
    chosen: Any = {**choice, "disable_parallel_tool_use": True}
    if stream:
        with client.messages.stream(**ASKED, tool_choice=chosen) as events:
            reply: Any = events.get_final_message()
    else:
        reply = client.messages.create(**ASKED, tool_choice=chosen)
    (call,) = reply.content
    assert_valid(call.name, json.dumps(call.input))
    assert call.name == choice.get("name", call.name)
    assert reply.stop_reason == "tool_use"


def test_a_call_that_is_cut_off(client: anthropic.Anthropic, dictate: Any) -> None:
    asked = {**dictate(TEXT), "max_tokens": TEXT.index("true") - 3}
    reply = client.messages.create(**asked)
    assert reply.stop_reason == "max_tokens"
    assert (reply.content[-1].name, reply.content[-1].input) == ("turn", {})
