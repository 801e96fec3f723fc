"""What streams of all dialects have in common: whole characters, no stop texts, and where and how
fast an answer was computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from calling import Dictated
from serving import Running

from edgellm.llm import LLM

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TEXT = "naïve 日本 🙂 and 👩\u200d👧 done"


@dataclass(frozen=True)
class Api:
    """A route, what it is asked, and where the text of a reply or an event is.

    Attributes:
        last: the event that tells of the whole answer, counted from the end.
    """

    path: str
    body: dict[str, Any]
    limit: Callable[[int], dict[str, Any]]
    stops: Callable[[list[str]], dict[str, Any]]
    text: Callable[[Any], str]
    last: int = -1

    def send(
        self, server: Running, *, stream: bool, tokens: int = 99, stop: list[str] | None = None
    ) -> list[Any]:
        """The events, which are UTF-8 each; of a reply that is whole, one."""
        body = {**self.body, "stream": stream}
        for more in (self.limit(tokens), self.stops(stop or [])):
            options = {**body.get("options", {}), **more.get("options", {})}
            body |= {**more, "options": options} if options else more
        reply = server.post(self.path, body)
        assert reply.status_code == 200, reply.text
        return _events(reply) if stream else [json.loads(reply.content.decode())]

    def ask(self, server: Running, **how: Any) -> tuple[str, list[Any]]:
        """The text and the events."""
        events = self.send(server, **how)
        return "".join(map(self.text, events)), events


def _events(reply: httpx.Response) -> list[Any]:
    lines = [line for line in reply.content.split(b"\n") if line[:1] not in (b"", b":", b"e")]
    data = [line.removeprefix(b"data: ").decode("utf-8") for line in lines]
    return [json.loads(line) for line in data if line != "[DONE]"]


def _chat_text(event: Any) -> str:
    (choice,) = event["choices"]
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def _message_text(event: Any) -> str:
    blocks = event.get("content", [event.get("delta", {})])
    return "".join(block.get("text", "") for block in blocks)


def _response_text(event: Any) -> str:
    if event.get("object") == "response":
        (item,) = event["output"]
        return "".join(part["text"] for part in item["content"])
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _limit(name: str) -> Callable[[int], dict[str, Any]]:
    return lambda tokens: {name: tokens}


def _stops(name: str) -> Callable[[list[str]], dict[str, Any]]:
    return lambda stop: {name: stop} if stop else {}


OPENAI_FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
APIS = [
    Api(
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": OPENAI_FORMAT},
        _limit("max_tokens"),
        _stops("stop"),
        _chat_text,
    ),
    Api(
        "/v1/completions",
        {"prompt": "a", "response_format": OPENAI_FORMAT},
        _limit("max_tokens"),
        _stops("stop"),
        lambda event: str(event["choices"][0]["text"]),
    ),
    Api(
        "/v1/responses",
        {"input": "a", "text": {"format": {**FORMAT, "name": "x"}}},
        _limit("max_output_tokens"),
        lambda _: {},
        _response_text,
    ),
    Api(
        "/v1/messages",
        {"messages": MESSAGES, "output_config": {"format": FORMAT}},
        _limit("max_tokens"),
        _stops("stop_sequences"),
        _message_text,
        last=-2,
    ),
    Api(
        "/completion",
        {"prompt": "a", "json_schema": SCHEMA},
        _limit("n_predict"),
        _stops("stop"),
        lambda event: str(event["content"]),
    ),
    Api(
        "/api/chat",
        {"messages": MESSAGES, "format": SCHEMA},
        lambda tokens: {"options": {"num_predict": tokens}},
        lambda stop: {"options": {"stop": stop}} if stop else {},
        lambda event: str(event["message"]["content"]),
    ),
]
STOPPING = [api for api in APIS if api.stops(["x"])]
each_api = pytest.mark.parametrize("api", APIS, ids=[api.path for api in APIS])


@pytest.fixture
def dictate(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What the model says where JSON is asked for; each byte that is no letter is a token."""

    def say(text: str) -> None:
        monkeypatch.setattr(LLM, "grammar_filter", lambda *_: Dictated(tiny, text))

    return say


@each_api
def test_characters_are_whole(server: Running, api: Api, dictate: Callable[[str], None]) -> None:
    dictate(TEXT)
    assert api.ask(server, stream=False)[0] == TEXT
    text, events = api.ask(server, stream=True)
    assert text == TEXT
    assert not any("\ufffd" in api.text(event) for event in events)


@each_api
def test_an_answer_that_ends_within_a_character(
    server: Running, tiny: LLM, api: Api, dictate: Callable[[str], None]
) -> None:
    """Half of it is told, as what cannot be read, and only at the end."""
    dictate("ab🙂cd")
    encode = tiny.engine.tokenizer.encode
    assert len(encode("ab🙂cd", add_bos=False)) == len(encode("abcd", add_bos=False)) + 4
    letters = len(encode("ab", add_bos=False))
    whole, _ = api.ask(server, stream=False, tokens=letters + 2)
    streamed, _ = api.ask(server, stream=True, tokens=letters + 2)
    assert whole == streamed
    assert whole.startswith("ab")
    assert set(whole[2:]) == {"\ufffd"}


@pytest.mark.parametrize("api", STOPPING, ids=[api.path for api in STOPPING])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("a🙂b", ["🙂"], "a"),
        ("a🙂b", ["🙃"], "a🙂b"),  # its first three bytes are the same
        ("one END", ["D", "ND"], "one E"),
        ("aaab", ["aab", "b"], "a"),
    ],
)
def test_nothing_of_a_stop_text_is_shown(
    server: Running,
    api: Api,
    dictate: Callable[[str], None],
    text: str,
    stop: list[str],
    shown: str,
) -> None:
    dictate(text)
    assert api.ask(server, stream=False, stop=stop)[0] == shown
    assert api.ask(server, stream=True, stop=stop)[0] == shown


@each_api
def test_the_end_tells_where_and_how_fast(server: Running, api: Api) -> None:
    for stream in (False, True):
        _, events = api.ask(server, stream=stream, tokens=3)
        last = events[api.last if stream else -1]
        last = last.get("response", last)
        assert last["placement"]["decode"].startswith("native")
        assert last["placement"]["ttft_ms"] > 0
        if api.path.startswith("/api/"):  # in nanoseconds
            assert last["eval_duration"] > 1
        else:
            assert last["timings"]["predicted_n"] > 0
            assert last["timings"]["predicted_ms"] >= 0


@each_api
def test_an_error_in_mid_stream_ends_that_stream_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch, api: Api
) -> None:
    """As the last thing that is told; what failed stands in the log."""
    failing = Dictated(server.llm, "well begun", fails=True)
    monkeypatch.setattr(LLM, "grammar_filter", lambda *_: failing)
    *begun, last = api.send(server, stream=True)
    assert "".join(map(api.text, begun)) == "well begun"
    assert "error" in last or last["type"] == "error"
    told = json.dumps(last)
    assert "its log says why" in told
    assert "secret" not in told
    monkeypatch.undo()
    assert api.ask(server, stream=True, tokens=3)[1]
