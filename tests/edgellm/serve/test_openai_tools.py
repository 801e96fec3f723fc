"""Tool calls and reasoning, as OpenAI's own client and langchain see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from calling import TOOLS, Dictated, assert_valid, tool_template
from parsing import fields_of, refusal
from serving import Running

from edgellm import LLM
from edgellm.serve.anthropic import messages
from edgellm.serve.ask import Conversation
from edgellm.serve.openai.messages import read_conversation
from edgellm.serve.openai.responses import read_response

MESSAGES: Any = [{"role": "user", "content": "go"}]
ASKED: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}


@pytest.fixture(autouse=True)
def with_tools(tiny: LLM) -> Iterator[None]:
    with tool_template(tiny):
        yield


@pytest.fixture
def dictate(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the model says where JSON is asked for."""

    def say(text: str) -> dict[str, Any]:
        monkeypatch.setattr(LLM, "grammar_filter", lambda *_: Dictated(tiny, text))
        return {**ASKED, "response_format": {"type": "json_object"}}

    return say


@pytest.mark.parametrize("seed", range(3))
def test_a_call_is_made_where_one_is_required(client: openai.OpenAI, seed: int) -> None:
    reply = client.chat.completions.create(
        **ASKED, tool_choice="required", parallel_tool_calls=False, seed=seed
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id
    assert_valid(call.function.name, call.function.arguments)


def test_a_named_tool(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "move"}}
    for seed in range(6):  # it is called once
        reply = client.chat.completions.create(**ASKED, tool_choice=choice, seed=seed)
        assert reply.choices[0].message.tool_calls is not None
        (call,) = reply.choices[0].message.tool_calls
        assert call.type == "function"
        assert call.function.name == "move"


def test_a_call_comes_in_parts(client: openai.OpenAI, dictate: Any) -> None:
    text = 'So.<call>{"name": "turn", "arguments": {"on": true}}</call>'
    text += '<call>{"name": "move", "arguments": {"to": "x"}}</call>'
    asked = dictate(text)
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.content == "So."
    calls: dict[int, dict[str, str]] = {}
    content, reason = "", None
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or []:
            assert part.function is not None
            if part.id is not None:  # first the name, with no arguments
                assert part.function.name
                calls[part.index] = {"name": part.function.name, "arguments": ""}
            calls[part.index]["arguments"] += part.function.arguments or ""
    assert content == "So."
    assert reason == "tool_calls" == whole.finish_reason
    expected = {0: {"name": "turn", "arguments": '{"on": true}'}}
    assert calls == {**expected, 1: {"name": "move", "arguments": '{"to": "x"}'}}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == {"on": True}  # it is strict
    assert message.tool_calls[1].function.arguments == '{"to": "x"}'


def test_a_round_trip(server: Running, client: openai.OpenAI, dictate: Any) -> None:
    asked = dictate('<call>{"name": "turn", "arguments": {"on": true}}</call>')
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.tool_calls is not None
    history: Any = [
        *MESSAGES,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "it is on"},
    ]
    reply = client.chat.completions.create(
        model="tiny", messages=history, tools=TOOLS, tool_choice="none", max_tokens=5
    )
    # the tools themselves are not shown where none may be called
    assert reply.choices[0].message.tool_calls is None
    prompt = '<|user|>u:go\n<|user|>a:<call>{"name": "turn", "arguments": {"on": true}}</call>\n'
    prompt += "<|user|>t:it is on\n<|user|>a:"
    shown = server.llm.engine.tokenizer.encode("turn move " + prompt, parse_special=True)
    bare = server.llm.engine.tokenizer.encode(prompt, parse_special=True)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens in (len(shown), len(bare))


def test_thoughts_are_apart(client: openai.OpenAI, dictate: Any) -> None:
    asked = dictate("<think>Let me see.</think>Yes.")
    reply = client.chat.completions.create(**asked)
    message: Any = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Let me see.")
    assert message.reasoning == message.reasoning_content
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens
    parts = {"content": "", "reasoning_content": "", "reasoning": ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for name in parts:
            parts[name] += getattr(chunk.choices[0].delta, name, None) or ""
    thoughts = "Let me see."
    assert parts == {"content": "Yes.", "reasoning_content": thoughts, "reasoning": thoughts}


def test_a_call_that_is_cut_off(client: openai.OpenAI, dictate: Any) -> None:
    asked = dictate('<call>{"name": "turn", "arguments": {"on": true}}</call>')
    reply = client.chat.completions.create(**{**asked, "max_tokens": 40})
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.tool_calls is not None
    call: Any = reply.choices[0].message.tool_calls[0]
    assert call.function.name == "turn"


def test_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked: Any = {"model": "tiny", "tools": tools, "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "extra_body": {"seed": 1}}
    reply = client.responses.create(input="go", **asked)
    (call,) = reply.output
    assert call.type == "function_call"
    assert_valid(call.name, call.arguments)
    assert reply.status == "completed"
    with client.responses.stream(input="go", **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response().output[0]
    assert "response.function_call_arguments.delta" in kinds
    assert final.type == "function_call"
    assert final.arguments == call.arguments
    items: Any = [
        {"role": "user", "content": "go"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    seeded: Any = {"extra_body": {"seed": 1}}
    after = client.responses.create(model="tiny", input=items, max_output_tokens=3, **seeded)
    assert after.usage is not None
    assert after.usage.output_tokens == 3


def test_tools_of_a_namespace(client: openai.OpenAI) -> None:
    """Codex's sub-agents; tools that OpenAI runs are left out."""
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    tools: Any = [
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "agents", "description": "", "tools": functions},
        {"type": "function", "name": "other", "parameters": {"type": "object"}},
    ]
    asked: Any = {"model": "tiny", "tools": tools, "parallel_tool_calls": False}
    asked |= {"tool_choice": {"type": "function", "name": "agents.move"}}
    with client.responses.stream(input="go", **asked) as stream:
        done = [e for e in stream if e.type == "response.output_item.done"][-1].item
        (call,) = stream.get_final_response().output
    for each in (done, call):
        assert each.type == "function_call"
        assert (each.name, each.model_dump()["namespace"]) == ("move", "agents")
    assert_valid("move", call.arguments)
    called = {**call.model_dump(exclude_none=True), "type": "function_call"}
    fields = {"tools": tools, "max_output_tokens": 1, "input": [called]}
    prompt = read_response(fields_of(fields)).prompt
    assert isinstance(prompt, Conversation)
    assert [tool.name for tool in prompt.tools][-1] == "other"
    assert prompt.messages[0].tool_calls[0].name == "agents.move"
    for wrong in ({"name": "a"}, {"tools": [3]}, {"tools": [{"type": "custom", "name": "x"}]}):
        given = [{"type": "namespace", "name": "n", **wrong}]
        error = refusal(read_response, {**fields, "tools": given})
        assert "tools[0].tools" in error.message
    for name in (None, "", 3):
        given = [{"type": "namespace", "name": name, "tools": functions}]
        assert "tools[0].name" in refusal(read_response, {**fields, "tools": given}).message
    nested = {**fields, "tools": [{"type": "namespace", "name": "n", "tools": TOOLS}]}
    nested |= {"tool_choice": {"type": "function", "namespace": "n", "name": "move"}}
    nested["input"] = [{"type": "web_search_call", "id": "w"}, {"role": "user", "content": "a"}]
    prompt = read_response(fields_of(nested)).prompt
    assert isinstance(prompt, Conversation)
    assert prompt.tool_choice == {"name": "n.move"}
    assert all(tool.name.startswith("n.") for tool in prompt.tools)
    same = [tools[1], tools[1]]
    assert "agents" in refusal(read_response, {**fields, "tools": same}).message


@pytest.mark.slow
def test_langchain(server: Running) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=SecretStr("x"), model="tiny", max_retries=0, seed=2
    )
    bound = chat.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke("go")
    (call,) = answer.tool_calls
    assert_valid(call["name"], json.dumps(call["args"]))
    result = ToolMessage("done", tool_call_id=call["id"])
    after = chat.bind(max_completion_tokens=3).invoke([HumanMessage("go"), answer, result])
    assert isinstance(after, AIMessage)
    assert after.usage_metadata is not None
    assert after.usage_metadata["output_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"reasoning_budget": 5}, 5),
        ({"thinking_budget": 0}, 0),
        ({"thinking_budget_tokens": 7}, 7),
        ({"reasoning_budget": -1}, None),
        ({}, None),
    ],
)
def test_budgets_of_reasoning(fields: dict[str, Any], budget: int | None) -> None:
    conversation = read_conversation(fields_of({"messages": MESSAGES, **fields}))
    assert conversation.reasoning_budget == budget
    thinking = {"type": "enabled", "budget_tokens": budget}
    body = {"messages": MESSAGES, "thinking": thinking}
    assert messages.read_conversation(fields_of(body)).reasoning_budget == budget
    assert (
        "reasoning_budget"
        in refusal(read_conversation, {"messages": MESSAGES, "reasoning_budget": -2}).message
    )
