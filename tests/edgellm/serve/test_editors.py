"""What editors send, each with what it reads of the answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from serving import Running

REQUESTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("editor_requests.json").read_text(encoding="utf-8")
)
STREAMED = [name for name, each in REQUESTS.items() if each["body"].get("stream")]
FIM = "/v1/fim/completions"


def send(server: Running, name: str) -> Any:
    request = REQUESTS[name]
    headers = {name: value.strip() for name, value in request.get("headers", {}).items()}
    reply = server.post(request["path"], request["body"], headers=headers)
    assert reply.status_code == request["expect"].get("status", 200), reply.text
    return reply


def events(text: str) -> list[Any]:
    """A stream's, without `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def has(value: Any, path: str) -> bool:
    """Whether an object has a key, or `outer.inner`."""
    for key in path.split("."):
        if key not in value:
            return False
        value = value[key]
    return True


@pytest.mark.parametrize("name", [name for name in REQUESTS if name not in STREAMED])
def test_requests(fim_server: Running, name: str) -> None:
    request, expected = REQUESTS[name]["body"], REQUESTS[name]["expect"]
    reply = send(fim_server, name)
    assert re.search(expected.get("raw_regex", ""), reply.text)
    body = reply.json()
    assert all(key in body for key in expected.get("keys", []))
    assert all(has(body, path) for path in expected.get("required", []))
    assert expected.get("body", body) == body
    if "n_cmpl" in request:
        assert len(body) == request["n_cmpl"]
        assert all(isinstance(answer["content"], str) for answer in body)


@pytest.mark.parametrize("name", STREAMED)
def test_streams(fim_server: Running, name: str) -> None:
    path = REQUESTS[name]["path"]
    text = send(fim_server, name).text
    all_events = events(text)
    assert text.rstrip().endswith("[DONE]") == path.startswith("/v1/")
    if path == "/completion":
        assert all(isinstance(event["content"], str) for event in all_events)
        assert [event["stop"] for event in all_events] == [False] * (len(all_events) - 1) + [True]
        return
    choices = [event["choices"][0] for event in all_events]  # each event has one
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(choices) - 1)
    assert reasons[-1] in ("stop", "length")
    read = (lambda one: one["delta"]["content"]) if path == FIM else (lambda one: one["text"])
    assert all(isinstance(read(choice), str) for choice in choices)


def test_mistrals_gap_is_the_librarys(fim_server: Running) -> None:
    gap = {"model": "fim", "prompt": "def f(", "suffix": "):\n"}
    expected = fim_server.llm.infill("def f(", "):\n", max_tokens=9)
    reply = fim_server.post(FIM, {**gap, "max_tokens": 9}).json()
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": expected.text,
        "refusal": None,
    }
    assert reply["usage"]["prompt_tokens"] == expected.stats.prompt_tokens
    assert reply["usage"]["completion_tokens"] == len(expected.tokens)
    chunks = events(fim_server.post(FIM, {**gap, "max_tokens": 9, "stream": True}).text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == expected.text
    assert chunks[-1]["usage"] == {**reply["usage"], **chunks[-1]["usage"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_mistrals_fields(fim_server: Running) -> None:
    sampled = {"prompt": "def f(", "max_tokens": 12, "temperature": 1.5, "random_seed": 5}
    expected = fim_server.llm.infill("def f(", "", max_tokens=12, temperature=1.5, seed=5)
    reply = fim_server.post(FIM, {**sampled, "suffix": None})  # at the end of a file
    assert reply.json()["choices"][0]["message"]["content"] == expected.text
    stop = expected.text[3:5]
    stopped = fim_server.post(FIM, {**sampled, "stop": stop}).json()["choices"][0]
    assert stopped["message"]["content"] == expected.text[: expected.text.index(stop)]
    assert stopped["finish_reason"] == "stop"
    ending = {**sampled, "logit_bias": {"257": 1000}}  # the end token
    counts = [
        fim_server.post(FIM, {**ending, "min_tokens": least}).json()["usage"]["completion_tokens"]
        for least in (0, 4, 50)
    ]
    assert counts == [1, 5, 12]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"suffix": 3}, "suffix"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"random_seed": "x"}, "random_seed"),
        ({"random_seed": -1}, "random_seed"),
    ],
)
def test_mistrals_wrong_fields(fim_server: Running, change: dict[str, Any], named: str) -> None:
    reply = fim_server.post(FIM, {"prompt": "a", "max_tokens": 1, **change})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_the_tokens(server: Running, stream: bool) -> None:
    reply = server.post(FIM, {"prompt": "a", "suffix": "b", "stream": stream})
    assert reply.status_code == 400
    assert "fill-in-the-middle" in reply.json()["error"]["message"]
