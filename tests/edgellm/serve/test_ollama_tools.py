"""Tool calls and thinking, as Ollama's own client sees them; and gaps, with a model for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from calling import TOOLS, Dictated, assert_valid, tool_template
from serving import Running

from edgellm import LLM

MESSAGES: Any = [{"role": "user", "content": "go"}]
ASKED: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
CALLS = (
    'So.<call>{"name": "turn", "arguments": {"on": true}}</call>'
    '<call>{"name": "move", "arguments": {"to": "x"}}</call>'
)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, trust_env=False) as client:
        yield client


@pytest.fixture
def with_tools(tiny: LLM) -> Iterator[None]:
    with tool_template(tiny):
        yield


@pytest.fixture
def dictate(with_tools: None, tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the model says where JSON is asked for."""

    def say(text: str) -> dict[str, Any]:
        monkeypatch.setattr(LLM, "grammar_filter", lambda *_: Dictated(tiny, text))
        return {**ASKED, "format": "json"}

    return say


def calls_of(reply: ollama.ChatResponse) -> list[tuple[str, Any]]:
    calls = reply.message.tool_calls or []
    return [(call.function.name, dict(call.function.arguments)) for call in calls]


def test_calls_have_objects_for_arguments(client: ollama.Client, dictate: Any) -> None:
    reply = client.chat(**dictate(CALLS))
    assert reply.message.content == "So."
    assert calls_of(reply) == [("turn", {"on": True}), ("move", {"to": "x"})]
    assert reply.done_reason == "stop"


def test_calls_are_told_when_they_are_complete(client: ollama.Client, dictate: Any) -> None:
    parts = list(client.chat(**dictate(CALLS), stream=True))
    assert "".join(part.message.content or "" for part in parts) == "So."
    calls = [call for part in parts for call in calls_of(part)]
    assert calls == [("turn", {"on": True}), ("move", {"to": "x"})]
    assert not parts[-1].message.tool_calls
    assert parts[-1].done_reason == "stop"


def test_a_round_trip(server: Running, client: ollama.Client, dictate: Any) -> None:
    message = client.chat(**dictate(CALLS)).message
    results: Any = [
        {"role": "tool", "tool_name": "move", "content": "moved"},
        {"role": "tool", "content": "it is on"},
    ]
    messages = [*MESSAGES, message.model_dump(exclude_none=True), *results]
    asked = {**ASKED, "messages": messages, "tool_choice": "none", "stream": False}
    reply = server.post("/api/chat", {**asked, "options": {"num_predict": 3}})
    prompt = f"<|user|>u:go\n<|user|>a:{CALLS}\n<|user|>t:moved\n<|user|>t:it is on\n<|user|>a:"
    tokens = server.llm.engine.tokenizer.encode("turn move " + prompt, parse_special=True)
    assert reply.json()["prompt_eval_count"] == len(tokens)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_a_call_is_made_where_one_is_required(
    server: Running, with_tools: None, choice: Any
) -> None:
    """With OpenAI's `tool_choice`, which Ollama has not."""
    options = {"num_predict": 200, "seed": 1}
    body = {**ASKED, "tool_choice": choice, "stream": False, "options": options}
    reply = server.post("/api/chat", body).json()
    function = reply["message"]["tool_calls"][0]["function"]
    assert_valid(function["name"], json.dumps(function["arguments"]))
    assert function["name"] == "move" or choice == "required"


def test_a_call_that_is_cut_off_is_text(client: ollama.Client, dictate: Any) -> None:
    cut = CALLS.index("true") - 1
    reply = client.chat(**dictate(CALLS), options={"num_predict": cut})
    assert calls_of(reply) == []
    assert reply.done_reason == "length"
    assert reply.message.content is not None
    assert reply.message.content.startswith('So.{"name": "turn", "arguments": {')


def test_thoughts_are_apart(client: ollama.Client, dictate: Any) -> None:
    asked = dictate("<think>Let me see.</think>Yes.")
    for stream in (False, True):
        reply: Any = client.chat(**asked, stream=stream, think=True)
        parts = list(reply) if stream else [reply]
        assert "".join(part.message.thinking or "" for part in parts) == "Let me see."
        assert "".join(part.message.content or "" for part in parts) == "Yes."
    whole = client.generate(model="tiny", prompt="go", format="json", think=True)
    assert (whole.thinking, whole.response) == ("Let me see.", "Yes.")


def test_what_a_model_can_do(client: ollama.Client, with_tools: None) -> None:
    assert client.show("tiny").capabilities == ["completion", "tools", "thinking"]


def test_a_model_without_tools(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not support tools") as raised:
        client.chat(**ASKED)
    assert raised.value.status_code == 400


def test_gaps_are_filled(fim_server: Running) -> None:
    options: Any = {"num_predict": 9}
    with ollama.Client(host=fim_server.url, trust_env=False) as client:
        reply = client.generate(model="fim", prompt="def f(", suffix="return 1", options=options)
        expected = fim_server.llm.infill("def f(", "return 1", max_tokens=9)
        assert reply.response == expected.text
        assert reply.prompt_eval_count == expected.stats.prompt_tokens
        shown = client.show("fim")
        assert shown.capabilities is not None
        assert "insert" in shown.capabilities
        assert ".Suffix" in (shown.template or "")
