"""`/v1/rerank` in the form of Jina, Cohere and llama.cpp, and lm-eval's scores of prompts."""

from __future__ import annotations

from typing import Any

import pytest
from serving import Running

BODY: dict[str, Any] = {"query": "cats", "documents": ["a cat", {"text": "dogs"}, "x"]}


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking"])
def test_documents_come_in_order(server: Running, path: str) -> None:
    reply = server.post(path, {**BODY, "return_documents": True}).json()
    expected = server.llm.rerank("cats", ["a cat", "dogs", "x"])
    assert [(r["index"], r["relevance_score"]) for r in reply["results"]] == [
        (each.index, pytest.approx(each.relevance, abs=1e-6)) for each in expected
    ]
    assert [r["document"]["text"] for r in reply["results"]] == [
        ["a cat", "dogs", "x"][each.index] for each in expected
    ]
    counts = [len(server.llm.engine.tokenizer.encode(t)) for t in ("cats", "a cat", "dogs", "x")]
    assert reply["usage"]["total_tokens"] == sum(counts)
    (best,) = server.post(path, {**BODY, "top_n": 1}).json()["results"]
    assert best["index"] == expected[0].index
    assert "document" not in best


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"query": ""}, 400, "query"),
        ({"query": None}, 400, "query"),
        ({"documents": []}, 400, "documents"),
        ({"documents": "a"}, 400, "documents"),
        ({"documents": ["a", 5]}, 400, "documents"),
        ({"documents": ["a", {"text": ""}]}, 400, "documents"),
        ({"documents": ["a"] * 257}, 400, "documents"),
        ({"documents": ["a " * 5000]}, 400, "too long"),
        ({"top_n": 0}, 400, "top_n"),
        ({"method": "best"}, 400, "method"),
        ({"method": "yes_no"}, 400, "'yes'"),
        ({"model": "other"}, 404, "other"),
    ],
    ids=str,
)
def test_wrong_fields(server: Running, change: dict[str, Any], status: int, named: str) -> None:
    reply = server.post("/v1/rerank", {**BODY, **change})
    assert reply.status_code == status, reply.text
    assert named in reply.json()["error"]["message"]
