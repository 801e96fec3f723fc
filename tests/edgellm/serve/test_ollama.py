"""Ollama's API, as Ollama's own client sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from calling import Dictated
from parsing import refusal
from serving import Running
from stepping import asking, held
from waiting import Clock, until

from edgellm import LLM
from edgellm.serve.http.fields import Fields
from edgellm.serve.ollama.messages import (
    generation_arguments,
    read_conversation,
    read_format,
    read_keep_alive,
    refuse_images,
    thinking_hints,
)

MESSAGES: Any = [{"role": "user", "content": "hello there"}]
OPTIONS: Any = {"num_predict": 12, "temperature": 0.8, "seed": 7}
SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, trust_env=False) as client:
        yield client


def lines(reply: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_chat_is_the_librarys(server: Running, client: ollama.Client) -> None:
    reply = client.chat(model="tiny", messages=MESSAGES, options=OPTIONS)
    expected = server.llm.chat(max_tokens=12, temperature=0.8, seed=7).send("hello there")
    assert reply.message.content == expected.text
    assert reply.message.role == "assistant"
    assert reply.done
    assert reply.done_reason == expected.finish_reason == "length"
    assert reply.eval_count == len(expected.tokens)
    # cached tokens are counted, as Ollama does
    assert reply.prompt_eval_count == expected.stats.prompt_tokens
    assert reply.total_duration is not None
    assert reply.eval_duration is not None
    assert reply.total_duration > reply.eval_duration > 1
    again = client.chat(model="tiny", messages=MESSAGES, options=OPTIONS)
    assert again.prompt_eval_count == reply.prompt_eval_count


def test_a_stream_has_the_same_text(client: ollama.Client) -> None:
    asked: Any = {"model": "tiny:latest", "messages": MESSAGES, "options": OPTIONS}
    whole = client.chat(**asked)
    parts = list(client.chat(**asked, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == whole.done_reason
    assert parts[-1].eval_count == whole.eval_count
    assert len(parts) >= 2  # tokens that are there at once are one
    assert {part.model for part in parts} == {"tiny:latest"}


def test_streams_are_lines_and_the_default(server: Running) -> None:
    reply = server.post("/api/generate", {"model": "tiny", "prompt": "a", "options": OPTIONS})
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    assert [line["done"] for line in lines(reply)][-1] is True
    assert all(line["created_at"].endswith("Z") for line in lines(reply))


def test_generate_goes_through_the_template(server: Running, client: ollama.Client) -> None:
    reply = client.generate(model="tiny", prompt="hello there", system="be kind", options=OPTIONS)
    chat = server.llm.chat(system="be kind", max_tokens=12, temperature=0.8, seed=7)
    assert reply.response == chat.send("hello there").text


def test_raw_prompts_are_taken_as_they_are(server: Running, client: ollama.Client) -> None:
    reply = client.generate(model="tiny", prompt="once upon", raw=True, options=OPTIONS)
    expected = server.llm.generate("once upon", max_tokens=12, temperature=0.8, seed=7)
    assert reply.response == expected.text
    assert reply.prompt_eval_count == expected.stats.prompt_tokens


def test_answers_of_a_schema(client: ollama.Client) -> None:
    for stream in (False, True):
        asked: Any = {"model": "tiny", "messages": MESSAGES, "format": SCHEMA, "stream": stream}
        reply = client.chat(**asked, options={"temperature": 0})
        parts = list(reply) if stream else [reply]
        text = "".join(part.message.content or "" for part in parts)
        assert set(json.loads(text)) == {"ok"}
        assert parts[-1].done_reason == "stop"
    anything = client.generate(
        model="tiny", prompt="a", format="json", options={"temperature": 0, "num_predict": 20}
    )
    assert anything.response is not None
    assert anything.response.lstrip().startswith("{")


def test_log_probabilities(server: Running, client: ollama.Client) -> None:
    reply = client.generate(
        model="tiny", prompt="a", raw=True, options=OPTIONS, logprobs=True, top_logprobs=2
    )
    expected = server.llm.generate("a", max_tokens=12, temperature=0.8, seed=7)
    assert reply.logprobs is not None
    assert [entry.logprob for entry in reply.logprobs] == pytest.approx(expected.logprobs)
    assert all(len(entry.top_logprobs or ()) == 2 for entry in reply.logprobs)


def test_stop_and_limits(client: ollama.Client) -> None:
    asked: Any = {"model": "tiny", "prompt": "once upon", "raw": True}
    whole = client.generate(**asked, options={**OPTIONS, "num_predict": 30}).response
    assert whole is not None
    stop = whole[8:11]
    cut = client.generate(**asked, options={**OPTIONS, "num_predict": 30, "stop": [stop]})
    assert cut.response == whole[: whole.index(stop)]
    assert cut.done_reason == "stop"


def test_a_full_context_goes_on_where_it_shifts(server: Running) -> None:
    options = {"num_predict": 150, "ignore_eos": True, "seed": 1}
    prompt = "a" * (server.llm.ctx_size - 100)
    asked = {"model": "tiny", "prompt": prompt, "raw": True, "stream": False, "options": options}
    ended = server.post("/api/generate", asked).json()
    shifted = server.post("/api/generate", {**asked, "shift": True}).json()
    assert (ended["done_reason"], shifted["done_reason"]) == ("length", "length")
    assert ended["eval_count"] <= 101 < shifted["eval_count"] == 150


def test_embeddings(server: Running, client: ollama.Client) -> None:
    one = client.embed(model="tiny", input="some text")
    two = client.embed(model="tiny", input=["some text", "another"], dimensions=8)
    openai = server.post("/v1/embeddings", {"input": "some text"}).json()["data"][0]["embedding"]
    assert one.embeddings[0] == pytest.approx(openai)
    assert [len(vector) for vector in two.embeddings] == [8, 8]
    assert one.prompt_eval_count is not None
    assert 0 < one.prompt_eval_count < (two.prompt_eval_count or 0)
    assert client.embeddings(model="tiny", prompt="some text").embedding == pytest.approx(openai)
    assert client.embed(model="tiny", input="").embeddings == []


def test_texts_to_embed_are_cut(server: Running, client: ollama.Client) -> None:
    """Unless that is forbidden; `/api/embeddings` knows no other way."""
    text = "ab cd " * server.llm.ctx_size
    with pytest.raises(ollama.ResponseError, match="shorten it") as raised:
        client.embed(model="tiny", input=text, truncate=False)
    assert raised.value.status_code == 400
    cut = client.embed(model="tiny", input=text)
    assert cut.prompt_eval_count == server.llm.ctx_size
    assert client.embed(model="tiny", input=text, truncate=True).embeddings == cut.embeddings
    assert client.embed(model="tiny", input=text * 100).embeddings == cut.embeddings
    older = client.embeddings(model="tiny", prompt=text)
    assert older.embedding == pytest.approx(cut.embeddings[0])


def test_models(server: Running, client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == "tiny:latest"
    assert listed.details is not None
    assert listed.details.family == "llama"
    assert listed.details.quantization_level == "F32"
    (loaded,) = client.ps().models
    assert loaded.name == "tiny:latest"
    assert loaded.context_length == server.llm.ctx_size
    assert loaded.expires_at is not None
    shown = client.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == server.llm.ctx_size
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.capabilities is not None
    assert "completion" in shown.capabilities
    assert "insert" not in shown.capabilities
    assert ".Suffix" not in (shown.template or "")
    assert server.post("/api/show", {"name": "tiny"}).json()["details"]["family"] == "llama"


def test_what_clients_look_for(server: Running) -> None:
    version = server.get("/api/version").json()["version"]
    assert len([int(part) for part in version.split(".")]) == 3
    assert server.get("/").text == "Ollama is running"
    with server.client() as client:
        head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")


def test_models_are_loaded_and_unloaded(
    server: Running, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.serve.model_pool.time", Clock())
    pool = server.answering.pool
    assert client.generate(model="tiny", keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    assert client.generate(model="tiny", prompt="").done_reason == "load"
    assert len(client.ps().models) == 1
    assert client.chat(model="tiny", messages=[], keep_alive="5m").done_reason == "load"
    assert pool.unloads_in("tiny") == 300
    assert client.chat(model="tiny", messages=MESSAGES, options=OPTIONS, keep_alive=0).done
    until(lambda: not pool.loaded())
    reply = server.post("/api/chat", {"messages": MESSAGES, "keep_alive": 0, "options": OPTIONS})
    assert lines(reply)[-1]["done"]
    until(lambda: not pool.loaded())
    client.generate(model="tiny", prompt="a", keep_alive=-1, options=OPTIONS)
    assert pool.unloads_in("tiny") == float("inf")
    (loaded,) = client.ps().models
    assert loaded.expires_at is not None
    assert loaded.expires_at.year == 9999
    client.generate(model="tiny", prompt="a", keep_alive="5m", options=OPTIONS)
    assert pool.unloads_in("tiny") == 300
    client.generate(model="tiny", prompt="a", options=OPTIONS)  # as the server has it again
    assert pool.unloads_in("tiny") == float("inf")


def test_a_description_names_the_model_as_clients_do(client: ollama.Client) -> None:
    assert client.show("tiny").modelfile == "FROM tiny\n"


def test_gaps_need_a_model_for_them(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not support insert") as raised:
        client.generate(model="tiny", prompt="def f(", suffix="return 1")
    assert raised.value.status_code == 400


def test_unknown_models_are_not_found(client: ollama.Client) -> None:
    for ask in (
        lambda: client.chat(model="none", messages=MESSAGES),
        lambda: client.generate(model="none", prompt="a", stream=True).__next__(),
        lambda: client.embed(model="none", input="a"),
        lambda: client.show("none"),
    ):
        with pytest.raises(ollama.ResponseError, match="not found") as raised:
            ask()
        assert raised.value.status_code == 404


def test_nothing_is_changed_over_http(client: ollama.Client) -> None:
    for change in (
        lambda: client.pull("qwen3"),
        lambda: client.push("tiny"),
        lambda: client.create("mine", from_="tiny"),
        lambda: client.copy("tiny", "mine"),
        lambda: client.delete("tiny"),
    ):
        with pytest.raises(ollama.ResponseError, match="over HTTP") as raised:
            change()
        assert raised.value.status_code == 400


def read(fields: Fields) -> None:
    """The fields that say what is asked, and how it is answered."""
    refuse_images(fields)
    read_conversation(fields)
    generation_arguments(fields)
    read_format(fields)
    read_keep_alive(fields)
    thinking_hints(fields)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"prompt": "a", "images": ["aGk="]}, "`images`"),
        ({"prompt": "a", "format": "yaml"}, "`format`"),
        ({"prompt": "a", "options": {"temperature": "hot"}}, "`options.temperature`"),
        ({"prompt": "a", "options": {"num_predict": -3}}, "`options.num_predict`"),
        ({"prompt": "a", "options": {"mirostat": 1}}, "`options.mirostat`"),
        ({"prompt": "a", "options": {"tfs_z": 0.5}}, "`options.tfs_z`"),
        ({"prompt": "a", "options": []}, "`options`"),
        ({"prompt": "a", "options": {"stop": [""]}}, "`options.stop`"),
        ({"prompt": "a", "keep_alive": "soon"}, "`keep_alive`"),
        ({"prompt": "a", "keep_alive": True}, "`keep_alive`"),
        ({"prompt": "a", "options": {"mirostat": 10**400}}, "`options.mirostat`"),
        ({"prompt": "a", "think": "much"}, "`think`"),
        ({"messages": "a"}, "`messages`"),
        ({"messages": [{"role": "king", "content": "a"}]}, r"`messages\[0\].role`"),
        ({"messages": [{"content": "a"}]}, r"`messages\[0\].role`"),
        (
            {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
            r"`messages\[0\].images`",
        ),
        ({"messages": [*MESSAGES], "tools": [{"type": "x"}]}, "tool"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
            r"tool_calls\[0\]",
        ),
    ],
)
def test_wrong_fields_are_named(wrong: dict[str, Any], why: str) -> None:
    error = refusal(read, {"model": "tiny", **wrong})
    assert error.status == 400
    assert re.search(why, error.message)


@pytest.mark.parametrize(
    ("path", "wrong", "why"),
    [
        ("chat", {"messages": [{"content": "a"}]}, "`messages[0].role`"),
        ("generate", {"prompt": 3}, "`prompt`"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "`template`"),
        ("generate", {"prompt": "a", "context": [1, 2]}, "`context`"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, "`system`"),
        ("generate", {"prompt": "a", "suffix": "b", "system": "c"}, "`system`"),
        ("generate", {"prompt": "a", "format": {"type": 3}}, "schema"),
        ("generate", {"prompt": "a", "think": True}, "does not support thinking"),
        ("generate", {"prompt": "a", "stream": "yes"}, "`stream`"),
        ("embed", {"input": [1]}, "`input`"),
        ("embed", {"input": ["a", ""]}, "`input`"),
        ("embed", {"input": "a", "dimensions": 4096}, "`dimensions`"),
        ("embeddings", {"prompt": ["a"]}, "`prompt`"),
        ("show", {"model": 3}, "`model`"),
    ],
)
def test_wrong_fields_over_http(
    server: Running, path: str, wrong: dict[str, Any], why: str
) -> None:
    reply = server.post(f"/api/{path}", {"model": "tiny", **wrong})
    assert reply.status_code == 400
    assert set(reply.json()) == {"error"}
    assert why in reply.json()["error"]


def test_prompts_that_are_too_long(server: Running, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.generate(model="tiny", prompt="ab " * server.llm.ctx_size, stream=False)
    with pytest.raises(ollama.ResponseError, match="maximum context length") as raised:
        list(client.generate(model="tiny", prompt="ab " * server.llm.ctx_size, stream=True))
    assert raised.value.status_code == 400  # before the stream began


def test_unknown_paths_are_told_in_ollamas_way(server: Running) -> None:
    reply = server.get("/api/nothing")
    assert (reply.status_code, set(reply.json())) == (404, {"error"})


def test_who_goes_away_is_forgotten(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(server.llm, monkeypatch) as turnstile:
        with asking(server, "/api/generate", [{"model": "tiny", "prompt": "a"}]):
            (asked,) = turnstile.take_in(1)
        until(lambda: asked.withdrawn)
        assert turnstile.step() == (0, 0)


def test_an_error_in_mid_stream_is_the_last_line(
    server: Running, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Dictated(server.llm, "well begun", fails=True)
    monkeypatch.setattr(LLM, "grammar_filter", lambda *_: failing)
    asked: Any = {"model": "tiny", "prompt": "a", "format": "json"}
    reply = server.post("/api/generate", asked)
    assert reply.status_code == 200
    *parts, last = lines(reply)
    assert "".join(part["response"] for part in parts) == "well begun"
    assert set(last) == {"error"}
    assert "secret" not in last["error"]
    with pytest.raises(ollama.ResponseError, match="log says why"):
        list(client.generate(**asked, stream=True))
