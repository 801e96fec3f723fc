"""Rerank: documents by their relevance to a query, in the form of Jina, Cohere and llama.cpp."""

from __future__ import annotations

import secrets
from typing import Any

from edgellm.engine.relevance import DEFAULT_INSTRUCTION, RERANK_METHODS
from edgellm.results import ranked
from edgellm.serve.ask import RerankAsk
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.openai.completions import MAX_PROMPTS
from edgellm.serve.openai.sampling import MOST_MS

_LONGEST_INSTRUCTION = 4096


async def rerank(call: Call) -> Reply:
    fields = await call.fields()
    documents, shown = read_documents(fields)
    top_n = fields.whole("top_n", 1, 1 << 31)
    with_documents = bool(fields.flag("return_documents"))
    ask = RerankAsk(
        model=fields.text("model"),
        query=fields.required_text("query"),
        documents=documents,
        method=fields.choice("method", RERANK_METHODS) or "auto",  # type: ignore[arg-type]
        instruction=fields.text("instruction") or DEFAULT_INSTRUCTION,
        time_limit_ms=fields.whole("time_limit_ms", 1, MOST_MS),
    )
    if not ask.query:
        raise fields.wrong("query", "a text that is not empty")
    if len(ask.instruction) > _LONGEST_INSTRUCTION:
        raise fields.wrong("instruction", f"a text of at most {_LONGEST_INSTRUCTION} characters")
    found = await call.answering.rerank(ask, call.client)
    results: list[dict[str, Any]] = []
    for each in ranked(found.values, top_n):
        result: dict[str, Any] = {"index": each.index, "relevance_score": each.relevance}
        if with_documents:
            result["document"] = shown[each.index]
        results.append(result)
    return json_reply(
        {
            "id": f"rerank-{secrets.token_hex(12)}",
            "object": "list",
            "model": found.model,
            "results": results,
            "usage": {"prompt_tokens": found.tokens, "total_tokens": found.tokens},
        }
    )


def read_documents(fields: Fields) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Read the documents, texts or objects with a `text`; returns the texts, and the objects."""
    name = "documents"
    given = fields.required(name, fields.get(name))
    allowed = f"a list of 1 to {MAX_PROMPTS} texts, or objects with a `text`, none of them empty"
    if not isinstance(given, list) or not 0 < len(given) <= MAX_PROMPTS:
        raise fields.wrong(name, allowed)
    objects = [{"text": each} if isinstance(each, str) else each for each in given]
    texts = [each.get("text") if isinstance(each, dict) else None for each in objects]
    if not all(isinstance(text, str) and text for text in texts):
        raise fields.wrong(name, allowed)
    return tuple(texts), objects  # type: ignore[arg-type]


ROUTES = tuple(
    Route(path, {"POST": rerank})
    for path in ("/v1/rerank", "/v2/rerank", "/v1/reranking", "/rerank", "/reranking")
)
