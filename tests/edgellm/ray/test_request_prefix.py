"""What the front takes a prompt's beginnings to be: what models read, however it stands in JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from edgellm.ray.forwarding import request_prefix
from edgellm.ray.prefix_routing import PrefixRouting
from edgellm.serve.http.body import parse_fields

SYSTEM = "You answer in verse. " * 150
TOOL = {
    "type": "function",
    "function": {"name": "turn", "description": "Turn the light. " * 100, "parameters": {}},
}


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return {**fields, "messages": messages}


def names_of(body: str) -> list[bytes]:
    return request_prefix(parse_fields(body.encode()).values)


def test_a_conversation_that_goes_on_begins_alike() -> None:
    first = request_prefix(chat("s" * 3000, "question", temperature=0.1, model="m"))
    second = request_prefix(chat("s" * 3000, "question", "x" * 2000, "more", model="m", seed=4))
    other = request_prefix(chat("t" * 3000, "question", model="m"))
    assert len(first) == 5
    assert second[:5] == first
    assert len(second) == 9
    assert not set(first) & set(other)


@pytest.mark.parametrize(
    "body",
    [
        '{"model": "a", "temperature": 0.5, "messages": [%s, {"role": "user", "content": "a"}]}',
        '{"messages":[%s,{"content":"b","role":"user"}],"stream":true,"model":"other"}',
        '{"messages": [%s], "system": null, "tools": []}',
        '{"max_tokens": 9, "messages": [%s, {"role": "user", "content": null}], "user": "x"}',
    ],
)
@pytest.mark.parametrize(
    "message",
    [
        '{"role": "system", "content": %s}',
        '{ "content" : %s, "role" : "developer", "name": null }',
        '{"content": [{"text": %s, "type": "text"}], "role": "system"}',
        '{"role": "system", "content": [{"type": "text", "text": %s, "cache_control": {}}]}',
    ],
)
def test_a_system_prompt_is_one_however_it_is_written(body: str, message: str) -> None:
    names = names_of(body % (message % json.dumps(SYSTEM)))
    assert names[:6] == request_prefix(chat(SYSTEM, "go"))[:6]
    assert len(names) == len(SYSTEM) // 512 == 6
    escaped = json.dumps(SYSTEM).replace("a", r"\u0061")
    assert names_of(body % (message % escaped)) == names


def test_a_system_prompt_is_one_in_all_dialects() -> None:
    expected = request_prefix(chat(SYSTEM))
    assert len(expected) == 6
    user = [{"role": "user", "content": "go"}]
    header = {"type": "text", "text": "x-anthropic-billing-header: " + "a" * 600}
    for fields in (
        {"system": SYSTEM, "messages": user},  # Anthropic's
        {"system": [header, {"type": "text", "text": SYSTEM}], "messages": user},
        {"system": SYSTEM, "prompt": "go"},  # Ollama's
        {"instructions": SYSTEM, "input": "go"},  # of OpenAI's responses
        {"input": [{"role": "developer", "content": SYSTEM}, *user]},
    ):
        assert request_prefix(fields)[:6] == expected


def test_both_go_to_the_same_replica() -> None:
    routing, draw = PrefixRouting(), random.Random(0)
    busy = dict.fromkeys(("one", "two", "three"), 0)
    routing.sent(request_prefix({"model": "a", **chat(SYSTEM, "question")}), "two")
    message = f'{{"content":{json.dumps(SYSTEM)},"role":"system"}}'
    other = names_of(f'{{"temperature":1,"messages":[{message}]}}')
    assert {routing.ranked(other, busy, draw=draw)[0] for _ in range(50)} == {"two"}


def test_tools_are_behind_the_system_prompt() -> None:
    plain, tools = chat(SYSTEM, "a" * 600), chat(SYSTEM, "b" * 600, tools=[TOOL])
    assert request_prefix(plain)[:6] == request_prefix(tools)[:6]
    turned = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}  # type: ignore[attr-defined]
    marked = {**turned, "cache_control": {"type": "ephemeral"}}
    for tool in (turned, marked):
        assert request_prefix({**tools, "tools": [tool]}) == request_prefix(tools)
    assert request_prefix({**tools, "tools": []})[6:] != request_prefix(tools)[6:]


@pytest.mark.parametrize("field", ["prompt", "input", "input_prefix", "system", "instructions"])
def test_prompts_of_all_dialects(field: str) -> None:
    one, other = (request_prefix({field: "a" * 1500 + end * 500}) for end in "ab")
    assert one[:2] == other[:2]
    assert one[-1] != other[-1]


def test_tokens_are_told_apart() -> None:
    one = request_prefix({"prompt": [1, 23] * 400})
    assert len(one) >= 3
    assert one != request_prefix({"prompt": [12, 3] * 400})
    assert one[:3] == request_prefix({"prompt": [1, 23] * 400 + [0]})[:3]


def test_what_is_no_prompt_has_no_name() -> None:
    assert request_prefix({"max_tokens": 3, "prompt": None, "tools": None}) == []
    assert request_prefix({"messages": [{"role": "user", "content": "Hello"}]}) == []
    for wrong in (3, "a", {}, [3, None, [], {"role": ["x"]}, {"content": {}}]):
        assert request_prefix({"messages": wrong, "tools": wrong, "input": wrong}) == []
    assert request_prefix({"prompt": "\ud800" * 600})
    assert len(request_prefix({"prompt": "a" * 10_000_000})) == 256


def test_clients_with_other_keys_have_other_names() -> None:
    fields = {"prompt": "a" * 2000}
    assert not set(request_prefix(fields, salt="x")) & set(request_prefix(fields))
