"""Clients of npm, unchanged: OpenAI's, the AI SDK, Ollama's and Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from calling import tool_template
from npm_clients import run
from serving import Running, running, served

from edgellm.llm import LLM
from edgellm.results import Completion
from edgellm.serve import ModelPool, ServeOptions

pytestmark = pytest.mark.clients

ANSWER: Any = {"max_tokens": 20, "temperature": 0.8, "seed": 7}


@contextmanager
def calling_server(tiny: LLM, tiny_fim: LLM) -> Iterator[Running]:
    """A server of a model with tools, and of one for gaps."""
    pool = ModelPool([served(tiny), served(tiny_fim, "fim")])
    options = ServeOptions(port=0, grace_s=1)
    with tool_template(tiny), running(pool, tiny, options) as server:
        yield server


@pytest.fixture(scope="module")
def expected(tiny: LLM) -> str:
    """What all of them ask for first."""
    with tool_template(tiny):
        return tiny.chat(**ANSWER).send("hello there").text


@pytest.fixture(scope="module")
def greedy(tiny: LLM) -> Completion:
    """What they ask for where there is no seed."""
    with tool_template(tiny):
        return tiny.chat(max_tokens=20, temperature=0).send("hello there")


@pytest.fixture(scope="module")
def openai(tiny: LLM, tiny_fim: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with calling_server(tiny, tiny_fim) as server:
        return run("openai.mjs", server.url, tmp_path_factory.mktemp("openai"))


@pytest.fixture(scope="module")
def ai_sdk(tiny: LLM, tiny_fim: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with calling_server(tiny, tiny_fim) as server:
        return run("ai_sdk.mjs", server.url, tmp_path_factory.mktemp("ai_sdk"))


@pytest.fixture(scope="module")
def ollama(tiny: LLM, tiny_fim: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with calling_server(tiny, tiny_fim) as server:
        return run("ollama.mjs", server.url, tmp_path_factory.mktemp("ollama"))


@pytest.fixture(scope="module")
def anthropic(tiny: LLM, tiny_fim: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with calling_server(tiny, tiny_fim) as server:
        return run("anthropic.mjs", server.url, tmp_path_factory.mktemp("anthropic"))


def test_openai_chats(openai: dict[str, Any], expected: str) -> None:
    choice = openai["chat"]["choices"][0]
    assert choice["message"]["content"] == expected
    assert openai["stream"]["text"] == expected
    counts = {name: openai["chat"]["usage"][name] for name in ("prompt_tokens", "total_tokens")}
    assert openai["stream"]["usage"].items() >= counts.items()


def test_openai_calls_tools(openai: dict[str, Any]) -> None:
    called = openai["call"]
    assert called["finish_reason"] == "tool_calls"
    (call,) = called["message"]["tool_calls"]
    assert call["function"]["name"] == "turn"
    assert call["function"]["parsed_arguments"]["on"] in (True, False)
    assert called["fragments"] == call["function"]["arguments"]
    after = openai["after the call"]
    assert after["usage"]["completion_tokens"] == 5
    assert after["usage"]["prompt_tokens"] > openai["chat"]["usage"]["prompt_tokens"]


def test_openai_gaps_schemas_and_models(openai: dict[str, Any], tiny_fim: LLM) -> None:
    assert openai["schema"].keys() == {"unit", "tall"}
    assert openai["schema"]["unit"] in ("cm", "m")
    assert openai["suffix"] == tiny_fim.infill("def f(", "):\n", max_tokens=9).text
    assert openai["models"] == ["tiny", "fim"]


def test_openai_responses(openai: dict[str, Any], greedy: Completion) -> None:
    events, final = openai["responses"]["events"], openai["responses"]["final"]
    assert events[0] == "response.created"
    assert events[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in events
    assert final["usage"]["output_tokens"] == 9
    assert greedy.text.startswith(final["output_text"])


def test_openai_errors(openai: dict[str, Any]) -> None:
    unknown, wrong, long = (openai[name] for name in ("unknown model", "wrong field", "too long"))
    assert (unknown["class"], unknown["status"]) == ("NotFoundError", 404)
    assert unknown["code"] == "model_not_found"
    assert (wrong["class"], wrong["status"]) == ("BadRequestError", 400)
    assert "temperature" in wrong["message"]
    assert (long["class"], long["code"]) == ("BadRequestError", "context_length_exceeded")
    assert openai["left"]  # in mid-stream; `nothing_is_left` waits for its end


def test_ai_sdk_chats(ai_sdk: dict[str, Any], openai: dict[str, Any], expected: str) -> None:
    assert ai_sdk["chat"]["text"] == ai_sdk["stream"]["text"] == expected
    tokens = openai["chat"]["usage"]["completion_tokens"]
    assert ai_sdk["chat"]["usage"]["outputTokens"] == tokens
    assert ai_sdk["stream"]["usage"]["outputTokens"] == tokens
    assert ai_sdk["chat"]["finishReason"] == ai_sdk["stream"]["reason"]


@pytest.mark.parametrize("name", ["tools", "tools in a stream"])
def test_ai_sdk_calls_tools(ai_sdk: dict[str, Any], name: str) -> None:
    first, second = ai_sdk[name]["steps"]
    assert first["finishReason"] == "tool-calls"
    assert first["outputs"] == ["it is on"]
    assert first["inputs"][0] == ai_sdk[name]["calls"][-1]
    assert first["inputs"][0]["on"] in (True, False)
    assert second["finishReason"] in ("stop", "length")
    assert second["inputs"] == []


def test_ai_sdk_schemas(ai_sdk: dict[str, Any]) -> None:
    assert ai_sdk["schema"].keys() == {"unit", "tall"}
    assert ai_sdk["schema"]["unit"] in ("cm", "m")


def test_ai_sdk_texts_and_responses(ai_sdk: dict[str, Any], tiny: LLM, greedy: Completion) -> None:
    prompt = "user:\nonce upon\n\nassistant:\n"  # as the SDK writes it
    text = tiny.generate(prompt, max_tokens=9, seed=3, stop=["\nuser:"]).text
    assert ai_sdk["completion"] == text
    assert ai_sdk["responses"]["text"] == greedy.text
    assert ai_sdk["responses"]["usage"]["outputTokens"] == len(greedy.tokens)


def test_embeddings(openai: dict[str, Any], ai_sdk: dict[str, Any], ollama: dict[str, Any]) -> None:
    """The first asks for base64, the others for numbers."""
    for mine, *others in zip(*(it["embeddings"] for it in (openai, ai_sdk, ollama)), strict=True):
        for other in others:
            assert mine == pytest.approx(other, abs=1e-6)
        assert sum(value * value for value in mine) == pytest.approx(1, abs=1e-5)


def test_ai_sdk_errors(ai_sdk: dict[str, Any]) -> None:
    unknown, wrong = ai_sdk["unknown model"], ai_sdk["wrong field"]
    assert (unknown["class"], unknown["statusCode"]) == ("AI_APICallError", 404)
    assert "served are tiny, fim" in unknown["message"]
    assert (wrong["statusCode"], wrong["isRetryable"]) == (400, False)
    assert "temperature" in wrong["message"]
    assert ai_sdk["error of a stream"] == [404]


def test_ollama_chats(ollama: dict[str, Any], openai: dict[str, Any], expected: str) -> None:
    whole, last = ollama["chat"], ollama["stream"]["last"]
    assert whole["message"]["content"] == ollama["stream"]["text"] == expected
    assert last["done"]
    for counted in (whole, last):
        assert counted["eval_count"] == openai["chat"]["usage"]["completion_tokens"]
        assert counted["prompt_eval_count"] == openai["chat"]["usage"]["prompt_tokens"]


def test_ollama_calls_tools(ollama: dict[str, Any]) -> None:
    (call,) = ollama["call"]["tool_calls"]
    assert call["function"]["name"] == "turn"
    assert call["function"]["arguments"]["on"] in (True, False)
    after = ollama["after the call"]
    assert after["done"]
    assert after["prompt_eval_count"] > ollama["chat"]["prompt_eval_count"]
    assert "tool_calls" not in after["message"]


def test_ollama_gaps_schemas_and_models(ollama: dict[str, Any], tiny_fim: LLM) -> None:
    assert ollama["schema"].keys() == {"unit", "tall"}
    assert ollama["schema"]["unit"] in ("cm", "m")
    expected = tiny_fim.infill("def f(", "):\n", max_tokens=9).text
    assert ollama["suffix"] == ollama["suffix in a stream"] == expected
    assert ollama["models"] == ollama["loaded"] == ["tiny:latest", "fim:latest"]
    assert "insert" in ollama["can"]


def test_ollama_errors(ollama: dict[str, Any]) -> None:
    unknown, wrong, long = (ollama[name] for name in ("unknown model", "wrong option", "too long"))
    assert (unknown["class"], unknown["status"]) == ("ResponseError", 404)
    assert "served are tiny, fim" in unknown["message"]
    assert wrong["status"] == long["status"] == 400
    assert "temperature" in wrong["message"]
    assert "maximum context length" in long["message"]
    assert ollama["error of a stream"] == unknown
    assert ollama["left"]


def test_anthropic_chats(anthropic: dict[str, Any], openai: dict[str, Any], expected: str) -> None:
    whole, streamed = anthropic["chat"], anthropic["stream"]["final"]
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert whole["content"] == streamed["content"]
    assert whole["content"][0]["text"] == anthropic["stream"]["text"] == expected
    tokens = openai["chat"]["usage"]["completion_tokens"]
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] == tokens
    assert anthropic["count"] == {"input_tokens": openai["chat"]["usage"]["prompt_tokens"]}


def test_anthropic_calls_tools(anthropic: dict[str, Any]) -> None:
    message = anthropic["call"]["message"]
    assert message["stop_reason"] == "tool_use"
    (call,) = (block for block in message["content"] if block["type"] == "tool_use")
    assert call["name"] == "turn"
    assert call["input"]["on"] in (True, False)
    assert json.loads(anthropic["call"]["fragments"]) == call["input"]
    after = anthropic["after the call"]
    assert after["usage"]["output_tokens"] == 5
    assert [block["type"] for block in after["content"]] == ["text"]


def test_anthropic_schemas(anthropic: dict[str, Any]) -> None:
    assert anthropic["schema"].keys() == {"unit", "tall"}
    assert anthropic["schema"]["unit"] in ("cm", "m")


def test_anthropic_errors(anthropic: dict[str, Any]) -> None:
    unknown, wrong = anthropic["unknown model"], anthropic["wrong field"]
    assert (unknown["class"], unknown["status"]) == ("NotFoundError", 404)
    assert unknown["type"] == "not_found_error"
    assert (wrong["class"], wrong["status"]) == ("BadRequestError", 400)
    assert "temperature" in wrong["message"]
    assert anthropic["too long"]["type"] == "invalid_request_error"
    assert anthropic["error of a stream"] == unknown
    assert anthropic["left"]
