"""`/v1/chat/completions`, as OpenAI's own client sees it."""

from __future__ import annotations

from typing import Any

import openai
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
