"""`/v1/chat/completions`, as OpenAI's own client sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from serving import Running

MESSAGES: Any = [{"role": "user", "content": "hello there"}]


def test_an_answer_is_the_librarys(server: Running, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0.8, seed=7
    )
    expected = server.llm.chat(max_tokens=12, temperature=0.8, seed=7).send("hello there")
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].finish_reason == expected.finish_reason
    assert reply.object == "chat.completion"
    assert reply.model == "tiny"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(expected.tokens)
    assert reply.usage.prompt_tokens == expected.stats.prompt_tokens


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-2].model_extra is not None
    assert chunks[-2].model_extra["placement"]["decode"].startswith("native")
    assert chunks[-2].model_extra["timings"]["predicted_n"] == whole.usage.completion_tokens


def test_several_answers_are_those_of_their_seeds(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}
    reply = client.chat.completions.create(**asked, n=3, seed=5)
    alone = [client.chat.completions.create(**asked, seed=5 + i) for i in range(3)]
    texts = [choice.message.content for choice in reply.choices]
    assert texts == [one.choices[0].message.content for one in alone]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="served are tiny") as raised:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert raised.value.code == "model_not_found"
    assert client.chat.completions.create(model="", messages=MESSAGES, max_tokens=1).model == "tiny"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "edgellm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_health(server: Running) -> None:
    assert server.get("/health").json() == {"status": "ok"}
