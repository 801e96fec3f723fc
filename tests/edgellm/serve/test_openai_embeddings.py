"""`/v1/embeddings`: states of the library's own steps, pooled."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from serving import Running
from stepping import held
from waiting import until

from edgellm.engine.embedding import EmbeddingRequest
from edgellm.engine.one_sequence import Hooks, compute_prompt
from edgellm.llm import LLM

TEXTS = ["a cat", "the quick brown fox " * 20, "x"]


def states(llm: LLM, text: str) -> np.ndarray:
    """After the final norm, computed alone."""
    rows: list[np.ndarray] = []
    sequence = llm.engine.cache.sequence()
    tokens = llm.engine.tokenizer.encode(text, parse_special=True)
    hooks = Hooks(on_hidden=lambda hidden: rows.append(hidden.copy()))
    compute_prompt(llm.engine.prefill, tokens, sequence, hooks)
    sequence.close()
    return np.concatenate(rows).astype(np.float64)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_the_mean_of_the_states(server: Running, client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="tiny", input=TEXTS)
    assert [item.index for item in reply.data] == [0, 1, 2]
    for text, item in zip(TEXTS, reply.data, strict=True):
        expected = unit(states(server.llm, text).mean(axis=0))
        np.testing.assert_allclose(item.embedding, expected, atol=2e-6)
    counts = [len(server.llm.engine.tokenizer.encode(text)) for text in TEXTS]
    assert reply.usage.prompt_tokens == sum(counts)


def test_the_same_bits_again_in_company_and_cached(server: Running) -> None:
    body = {"input": TEXTS, "encoding_format": "base64"}
    together = server.post("/v1/embeddings", body).json()["data"]
    for text, expected in zip(TEXTS, together, strict=True):
        alone = server.post("/v1/embeddings", {**body, "input": text}).json()["data"][0]
        assert alone["embedding"] == expected["embedding"]


def test_many_texts_leave_room_for_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them are with the loop at once, and those that are done wait no more."""
    live, waiting, take = [], [], EmbeddingRequest.take

    def noting(self: EmbeddingRequest, *arguments: Any, **options: Any) -> None:
        live.append(server.live)
        waiting.append(server.limits.tokens)
        take(self, *arguments, **options)

    texts = [f"{number} cats" for number in range(9)]
    expected = server.post("/v1/embeddings", {"input": texts}).json()
    monkeypatch.setattr("edgellm.engine.loop._WINDOW", 2)
    monkeypatch.setattr(EmbeddingRequest, "take", noting)
    assert server.post("/v1/embeddings", {"input": texts}).json() == expected
    assert max(live) <= 2
    assert waiting[-1] < waiting[0] / 2
    assert server.limits.tokens == 0


def test_a_server_that_stops_ends_them(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, take = serving(), EmbeddingRequest.take

    def stopping(self: EmbeddingRequest, *arguments: Any, **options: Any) -> None:
        take(self, *arguments, **options)
        server.answering.stop()

    monkeypatch.setattr("edgellm.engine.loop._WINDOW", 1)
    monkeypatch.setattr(EmbeddingRequest, "take", stopping)
    reply = server.post("/v1/embeddings", {"input": ["a cat"] * 5})
    assert reply.status_code == 503
    assert "stopping" in reply.text


def test_base64_is_little_endian_float32(server: Running) -> None:
    plain = server.post("/v1/embeddings", {"input": "a"}).json()["data"][0]["embedding"]
    body = {"input": "a", "encoding_format": "base64"}
    data = base64.b64decode(server.post("/v1/embeddings", body).json()["data"][0]["embedding"])
    assert np.frombuffer(data, "<f4").tolist() == plain


def test_fewer_dimensions_have_length_one(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="tiny", input="a cat").data[0].embedding
    short = client.embeddings.create(model="tiny", input="a cat", dimensions=10).data[0].embedding
    np.testing.assert_allclose(short, unit(np.array(whole[:10])), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="have 96"):
        client.embeddings.create(model="tiny", input="a", dimensions=97)


def test_the_last_state(serving: Callable[..., Running], tiny: LLM) -> None:
    server = serving(pooling="last")
    embedding = server.post("/v1/embeddings", {"input": "a cat"}).json()["data"][0]["embedding"]
    expected = unit(states(tiny, "a cat</s>")[-1])
    np.testing.assert_allclose(embedding, expected, atol=2e-6)


@pytest.mark.parametrize("wrong", [None, "", [], [""], 3, ["a", 3], [[-1]], "y" * 3000])
def test_wrong_inputs(server: Running, wrong: object) -> None:
    reply = server.post("/v1/embeddings", {"input": wrong})
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("route", ["/v1/embeddings", "/api/embed"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_time_limit(
    server: Running,
    serving: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    asked: bool,
) -> None:
    """Of the request or of the server; what was begun is withdrawn."""
    body: dict[str, Any] = {"input": ["the quick brown fox " * 40] * 9}
    if asked:
        body["time_limit_ms"] = 30
    else:
        server = serving(time_limit_ms=30)
    with held(server.llm, monkeypatch):
        reply = server.post(route, body)
    assert reply.status_code == 503, reply.text
    assert reply.headers["retry-after"] == "1"
    assert "30 ms" in reply.text
    until(lambda: server.idle)
    if asked:
        body = {"input": "a", "time_limit_ms": 3_600_000}
        assert server.post(route, body).status_code == 200
    for wrong in (0, -1, "1", 1.5):
        assert server.post(route, {"input": "a", "time_limit_ms": wrong}).status_code == 400
