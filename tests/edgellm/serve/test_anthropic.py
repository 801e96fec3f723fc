"""Anthropic's messages, as Anthropic's own client sees them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from calling import Dictated
from parsing import refusal
from serving import Running
from stepping import asking, held
from waiting import until

from edgellm import LLM
from edgellm.serve.anthropic.chat import read_ask

MESSAGES: Any = [{"role": "user", "content": "hello there"}]
ASKED: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
# The client has no names for them any more.
SEED: Any = {"extra_body": {"seed": 7, "temperature": 0.8}}
SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The data of each event, whose name is its type."""
    found = []
    for event in reply.text.strip().split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_an_answer_is_the_librarys(server: Running, client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**ASKED, system="be kind", **SEED)
    chat = server.llm.chat(system="be kind", max_tokens=12, temperature=0.8, seed=7)
    expected = chat.send("hello there")
    assert [(block.type, block.text) for block in reply.content] == [("text", expected.text)]
    assert (reply.role, reply.type, reply.model) == ("assistant", "message", "tiny")
    assert (reply.stop_reason, reply.stop_sequence) == ("max_tokens", None)
    assert reply.usage.output_tokens == len(expected.tokens)
    cached = reply.usage.cache_read_input_tokens
    assert cached is not None
    assert reply.usage.input_tokens + cached == expected.stats.prompt_tokens


def test_cached_tokens_are_counted_apart(client: anthropic.Anthropic) -> None:
    text = "a text that nobody else sends " * 12
    asked: Any = {**ASKED, "messages": [{"role": "user", "content": text}]}
    first, second = (client.messages.create(**asked).usage for _ in range(2))
    early, late = first.cache_read_input_tokens, second.cache_read_input_tokens
    assert early is not None
    assert late is not None
    assert early < 20 < 300 < late
    assert second.input_tokens + late == first.input_tokens + early
    counted = client.messages.count_tokens(model="tiny", messages=asked["messages"])
    assert counted.input_tokens == first.input_tokens + early


def test_a_stream_has_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED, **SEED)
    with client.messages.stream(**ASKED, **SEED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.content[0].text == text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    # the counts of the end replace those of the beginning, where the cache was not asked yet
    assert final.usage.cache_read_input_tokens
    prompt = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert prompt == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_the_order_of_events(server: Running) -> None:
    reply = server.post("/v1/messages", {**ASKED, "stream": True})
    kinds = [event["type"] for event in events(reply)]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    start, *_ = events(reply)
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] > 0
    assert {event["index"] for event in events(reply) if "index" in event} == {0}


def test_the_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    asked: Any = {**ASKED, "max_tokens": 30}
    whole = client.messages.create(**asked, **SEED).content[0].text
    stop = whole[8:11]
    for stream in (False, True):
        stops = ["never in it", stop]
        if stream:
            with client.messages.stream(**asked, stop_sequences=stops, **SEED) as events:
                reply: Any = events.get_final_message()
        else:
            reply = client.messages.create(**asked, stop_sequences=stops, **SEED)
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
        assert reply.content[0].text == whole[: whole.index(stop)]


def test_the_end_of_the_context_is_told(server: Running, client: anthropic.Anthropic) -> None:
    size = server.llm.ctx_size
    text = "x" * (size - 40)
    reply = client.messages.create(
        model="tiny",
        max_tokens=size,
        messages=[{"role": "user", "content": text}],
        extra_body={"ignore_eos": True},
    )
    assert reply.stop_reason == "model_context_window_exceeded"


def test_a_prompt_can_be_computed_ahead(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**{**ASKED, "max_tokens": 0})
    assert reply.content == []
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 0)


def test_answers_of_a_schema(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(
        model="tiny",
        max_tokens=60,
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        extra_body={"temperature": 0},
    )
    assert set(json.loads(reply.content[0].text)) == {"ok"}
    assert reply.stop_reason == "end_turn"


def test_blocks_are_texts_one_behind_the_other(client: anthropic.Anthropic) -> None:
    plain: Any = {"system": "one\n\ntwo", "messages": [{"role": "user", "content": "a\n\nb"}]}
    document: Any = {"type": "document", "source": {"type": "text", "data": "b"}}
    blocks: Any = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=0123;"},
            {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "two"},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, document]}],
    }
    common: Any = {**ASKED, "metadata": {"user_id": "me"}, **SEED}
    one, two = (client.messages.create(**{**common, **each}) for each in (plain, blocks))
    assert one.content == two.content


def test_what_changes_with_the_files_stands_behind_the_tools(client: anthropic.Anthropic) -> None:
    plain: Any = {"system": "one", "messages": [{"role": "user", "content": "gitStatus: M f\n\na"}]}
    moved: Any = {
        "system": [{"type": "text", "text": "one\n\ngitStatus: M f"}],
        "messages": [{"role": "user", "content": "a"}],
    }
    replies = [client.messages.create(**{**ASKED, **SEED, **each}) for each in (plain, moved)]
    assert replies[0].content == replies[1].content
    assert (
        replies[1].usage.cache_read_input_tokens
        == sum(
            count or 0
            for usage in [replies[0].usage]
            for count in (usage.input_tokens, usage.cache_read_input_tokens)
        )
        - 1
    )


def test_a_system_message_behind_the_last_one(client: anthropic.Anthropic) -> None:
    """Claude Code sends reminders so."""
    messages: Any = [*MESSAGES, {"role": "system", "content": "Be brief."}]
    reply = client.messages.create(**{**ASKED, "messages": messages}, **SEED)
    without = client.messages.create(**ASKED, **SEED)
    assert reply.usage.output_tokens > 0
    used = [each.usage for each in (reply, without)]
    longer, shorter = (u.input_tokens + (u.cache_read_input_tokens or 0) for u in used)
    assert longer > shorter


def test_an_answer_is_gone_on_with(server: Running, client: anthropic.Anthropic) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    reply = client.messages.create(**{**ASKED, "messages": begun}, **SEED)
    prompt = "<|user|>hello there<|user|>Well"
    tokens = server.llm.engine.tokenizer.encode(prompt, add_bos=False, parse_special=True)
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == len(tokens)
    with server.llm.session() as session:
        session.replace(tokens)
        expected = session.generate(max_tokens=12, temperature=0.8, seed=7)
    assert reply.content[0].text == expected.text


def test_keys(serving: Callable[..., Running]) -> None:
    server = serving(api_keys=("secret",))
    with (
        anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0) as wrong,
        anthropic.Anthropic(base_url=server.url, api_key="secret") as right,
        anthropic.Anthropic(base_url=server.url, auth_token="secret") as bearer,
    ):
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**ASKED)
        assert right.messages.create(**ASKED).content
        assert bearer.messages.create(**ASKED).content


def test_unknown_models_are_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="served are tiny") as raised:
        client.messages.create(**{**ASKED, "model": "claude-opus"})
    assert raised.value.response.json()["error"]["type"] == "not_found_error"


def of(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, *MESSAGES]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "data": "aGk="}}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"max_tokens": None}, "`max_tokens` is missing"),
        ({"max_tokens": -1}, "`max_tokens`"),
        ({"max_tokens": "12"}, "`max_tokens`"),
        ({"messages": None}, "`messages` is missing"),
        ({"messages": []}, "`messages`"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "system", "content": "a"}]}, "`messages`"),
        (of(IMAGE), "'image'"),
        (of(PDF), "'document'"),
        (of({"type": "text"}), "text` is missing"),
        (of({"text": "a"}), "type` is missing"),
        (of({"type": "tool_result", "content": "a"}), "tool_use_id` is missing"),
        (of({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), "'image'"),
        (of({"type": "tool_use", "id": "a", "name": "b", "input": 3}, role="assistant"), "input"),
        ({"system": 3}, "`system`"),
        ({"system": [{"type": "image"}]}, "`system"),
        ({"stop_sequences": [""]}, "stop"),
        ({"temperature": "hot"}, "`temperature`"),
        ({"thinking": {"type": "much"}}, "`thinking.type`"),
        ({"tools": [{"name": "a"}]}, "input_schema` is missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{**TOOL, "name": "no name"}]}, "no name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "hear"}}, "hear"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "`tool_choice.type`"),
        ({"tool_choice": {"type": "any"}}, "tool"),
        ({"output_config": {"format": {"type": "xml"}}}, "`output_config.format.type`"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema` is missing"),
    ],
)
def test_wrong_fields_are_named(wrong: dict[str, Any], why: str) -> None:
    error = refusal(read_ask, {**ASKED, **wrong})
    assert error.status == 400
    assert why in error.message


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"max_tokens": -1}, "`max_tokens`"),
        (of(IMAGE), "'image'"),
        ({"tools": [TOOL]}, "no place for tools"),
        ({"stream": "yes"}, "`stream`"),
    ],
)
def test_wrong_fields_over_http(server: Running, wrong: dict[str, Any], why: str) -> None:
    for stream in (False, True):
        reply = server.post("/v1/messages", {"stream": stream, **ASKED, **wrong})
        assert reply.status_code == 400
        assert reply.json()["type"] == "error"
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert why in reply.json()["error"]["message"]


def test_other_errors(server: Running, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(
            model="tiny",
            max_tokens=3,
            messages=[{"role": "user", "content": "ab " * server.llm.ctx_size}],
        )
    reply = server.get("/v1/messages")
    assert (reply.status_code, reply.json()["type"]) == (405, "error")
    with server.client() as http:
        reply = http.post("/v1/messages", content=b"{")
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_busy_server_is_overloaded(serving: Callable[..., Running]) -> None:
    server = serving(max_waiting=1)
    counted = server.limits.take_in("")
    try:
        reply = server.post("/v1/messages", ASKED)
    finally:
        counted.leave()
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "overloaded_error")
    assert int(reply.headers["retry-after"]) >= 1


def test_who_goes_away_is_forgotten(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(server.llm, monkeypatch) as turnstile:
        with asking(server, "/v1/messages", [{**ASKED, "stream": True}]):
            (asked,) = turnstile.take_in(1)
        until(lambda: asked.withdrawn)
        assert turnstile.step() == (0, 0)


def test_an_error_in_mid_stream(
    server: Running, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Dictated(server.llm, "well begun", fails=True)
    monkeypatch.setattr(LLM, "grammar_filter", lambda *_: failing)
    asked = {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    parts: list[str] = []

    def read() -> None:
        with client.messages.stream(**asked) as stream:
            parts.extend(stream.text_stream)

    with pytest.raises(anthropic.APIStatusError, match="log says why") as raised:
        read()
    assert "secret" not in str(raised.value)
    assert "".join(parts) == "well begun"


def test_models(server: Running, client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert [(model.id, model.type) for model in page.data] == [("tiny", "model")]
    assert page.has_more is False
    assert page.first_id == page.last_id == "tiny"
    model = client.models.retrieve("tiny")
    assert model == page.data[0]
    assert model.created_at.tzinfo is not None
    assert model.lifecycle == "active"
    assert model.max_input_tokens == server.llm.ctx_size
    assert client.models.list(after_id="tiny").data == []
    assert client.models.list(before_id="elsewhere", limit=1).data == page.data
    with pytest.raises(anthropic.NotFoundError, match="elsewhere"):
        client.models.retrieve("elsewhere")
