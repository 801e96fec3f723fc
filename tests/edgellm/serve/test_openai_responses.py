"""`/v1/responses`, as OpenAI's own client sees it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from parsing import refusal
from serving import Running

from edgellm.serve.openai.responses import read_response

ASKED: Any = {"model": "tiny", "max_output_tokens": 12, "temperature": 0.8}


def test_an_answer_is_that_of_a_chat(server: Running, client: openai.OpenAI) -> None:
    reply = client.responses.create(input="hello there", **ASKED, extra_body={"seed": 7})
    expected = server.llm.chat(max_tokens=12, temperature=0.8, seed=7).send("hello there")
    assert reply.output_text == expected.text
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    message: Any = reply.output[-1]
    assert message.status == "incomplete"
    assert reply.usage is not None
    assert reply.usage.output_tokens == len(expected.tokens)


def test_a_stream_tells_the_same(client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "input": "hello there", "extra_body": {"seed": 7}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    last: Any = events[-1]
    assert last.response.output[0].content[0].text == text
    item: Any = events[-2]
    assert item.item.status == last.response.output[0].status == "incomplete"


def test_a_stream_with_the_clients_helper(client: openai.OpenAI) -> None:
    expected = client.responses.create(input="hello", **ASKED).output_text
    with client.responses.stream(input="hello", **ASKED) as stream:
        events = list(stream)
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == expected
    assert events[-1].type == "response.incomplete"


def test_items_become_a_conversation(server: Running, client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    reply = client.responses.create(input=items, instructions="brief", **ASKED)
    assert reply.usage is not None
    # the template writes one token before each message, and this tokenizer has bytes
    assert reply.usage.input_tokens == 4 + len("briefonetwothree")


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    reply = client.responses.create(model="tiny", input="go", text=form)
    assert json.loads(reply.output_text)["a"] in ("x", "y")
    assert reply.status == "completed"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"input": None},
        {"input": []},
        {"input": 3},
        {"input": [{"role": "robot", "content": "a"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
            ]
        },
        {"input": [{"type": "function_call_output", "output": "a"}]},
        {"input": "a", "previous_response_id": "resp_1"},
        {"input": "a", "conversation": "c"},
        {"input": "a", "background": True},
        {"input": "a", "store": True},
        {"input": "a", "text": {"format": {"type": "json_schema"}}},
        {"input": "a", "tools": [{"type": "local_shell"}]},
    ],
)
def test_wrong_fields(wrong: dict[str, Any]) -> None:
    error = refusal(read_response, {"max_output_tokens": 1, **wrong})
    assert error.status == 400
    if "tools" in wrong:
        assert "tools[0].type" in error.message
    names = {"previous_response_id", "conversation", "background", "store"} & wrong.keys()
    assert all(name in error.message for name in names)


def test_wrong_fields_over_http(server: Running) -> None:
    reply = server.post("/v1/responses", {"input": "a", "store": True})
    assert reply.status_code == 400, reply.text
    assert "`store`" in reply.json()["error"]["message"]
