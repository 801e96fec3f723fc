"""`/v1/chat/completions`, as OpenAI's own client sees it."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
import pytest
from serving import Running, running, served

from edgellm import LLM
from edgellm.serve import ModelPool, ServeOptions

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


def test_log_probabilities(server: Running, client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "seed": 3}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=4)
    expected = server.llm.chat(max_tokens=30, seed=3, logprobs=4).send("hello there")
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == pytest.approx(expected.logprobs)
    data = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    ends = b"</s>" if expected.finish_reason == "stop" else b""
    assert data.removesuffix(ends).decode(errors="replace") == expected.text
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, logprobs=True, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed += choice.logprobs.content or []
    assert [e.logprob for e in streamed] == [entry.logprob for entry in logprobs.content]


class Inner(pydantic.BaseModel):
    flag: bool


class Size(pydantic.BaseModel):
    """A schema with a description, an enumeration and a reference."""

    unit: Literal["cm", "m"]
    values: list[bool] = pydantic.Field(max_length=2)
    inner: Inner | None


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Size, seed=1
    )
    assert isinstance(reply.choices[0].message.parsed, Size)
    plain = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_tokens=60,
        seed=1,
    )
    assert (plain.choices[0].message.content or "").lstrip()[:1] == "{"


def test_stop_texts_are_no_part_of_an_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "seed": 3}
    whole = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = whole[20:22]
    reply = client.chat.completions.create(**asked, stop=[stop])
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_a_bias_rules_tokens_out(client: openai.OpenAI) -> None:
    bias = {str(token): -100 for token in range(320) if token != 65}
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, logit_bias=bias
    )
    assert len(set(reply.choices[0].message.content or "")) == 1


def test_parts_and_roles(client: openai.OpenAI) -> None:
    def tokens(messages: Any) -> int:
        reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert reply.usage is not None
        return reply.usage.prompt_tokens

    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    assert tokens([{"role": "user", "content": parts}]) == tokens(MESSAGES)
    assert tokens([{"role": "developer", "content": "be brief"}, *MESSAGES]) == tokens(
        [{"role": "system", "content": "be brief"}, *MESSAGES]
    )
    assert tokens([*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES]) > 20


def test_the_assistants_last_message_goes_on(server: Running, client: openai.OpenAI) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    asked: Any = {"model": "tiny", "max_tokens": 8, "seed": 2}
    reply = client.chat.completions.create(messages=begun, **asked)
    prompt = "<|user|>hello there<|user|>I am"
    expected = server.llm.generate(prompt, max_tokens=8, seed=2)
    assert reply.choices[0].message.content == expected.text
    with pytest.raises(openai.BadRequestError, match="two of the assistant"):
        client.chat.completions.create(messages=[*begun, begun[-1]], **asked)


def test_usage_says_what_was_cached(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "many words of a long question " * 9}]
    asked: Any = {"model": "tiny", "messages": messages, "max_tokens": 1}
    client.chat.completions.create(**asked)
    usage = client.chat.completions.create(**asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


@pytest.mark.slow
def test_langchain(server: Running) -> None:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
    from pydantic import SecretStr

    common: Any = {"base_url": f"{server.url}/v1", "api_key": SecretStr("x"), "model": "tiny"}
    chat = ChatOpenAI(**common, max_retries=0, seed=3, temperature=0.5, max_completion_tokens=20)
    expected = server.llm.chat(max_tokens=20, seed=3, temperature=0.5).send("hello there").text
    assert chat.invoke("hello there").content == expected
    assert "".join(str(chunk.content) for chunk in chat.stream("hello there")) == expected
    endless = ChatOpenAI(**common, max_retries=0, seed=3)
    structured = endless.with_structured_output(Size, method="json_schema")
    assert isinstance(structured.invoke("go"), Size)
    texts = OpenAI(**common, max_retries=0, max_tokens=5, seed=1).batch(["a", "b"])
    sampled: Any = {"max_tokens": 5, "seed": 1, "temperature": 0.7, "top_p": 1}  # its own
    assert texts == [server.llm.generate(prompt, **sampled).text for prompt in "ab"]
    embedder = OpenAIEmbeddings(**common, check_embedding_ctx_length=False)
    assert [len(vector) for vector in embedder.embed_documents(["a", "b"])] == [96, 96]


@pytest.mark.slow
def test_the_default_model(chosen_llm: LLM) -> None:
    options = ServeOptions(port=0, grace_s=1)
    pool = ModelPool([served(chosen_llm, "smollm2")])
    with (
        running(pool, chosen_llm, options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
    ):
        messages: Any = [{"role": "user", "content": "Name the capital of France."}]
        reply = client.chat.completions.create(model="smollm2", messages=messages, temperature=0)
        assert "Paris" in (reply.choices[0].message.content or "")
        with client.responses.stream(
            model="smollm2", input="Name the capital of France.", temperature=0
        ) as stream:
            for _ in stream:
                pass
            assert "Paris" in stream.get_final_response().output_text
