"""OpenAI's `/v1/embeddings`, and rerank in the form of Jina, Cohere and llama.cpp."""

from __future__ import annotations

import base64
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.engine.embedding import DEFAULT_INSTRUCTION, RERANK_METHODS
from edgellm.results import ranked
from edgellm.serve.ask import EmbeddingAsk, RerankAsk
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.openai.completions import MAX_PROMPTS, read_prompts
from edgellm.serve.openai.sampling import MOST_MS
from edgellm.serve.request_error import RequestError

_MOST_DIMENSIONS = 1 << 20
_LONGEST_INSTRUCTION = 4096


async def embeddings(call: Call) -> Reply:
    fields = await call.fields()
    in_base64 = fields.choice("encoding_format", ("float", "base64")) == "base64"
    dimensions = read_dimensions(fields)
    ask = EmbeddingAsk(
        model=fields.text("model"),
        prompts=read_texts(fields, "input"),
        time_limit_ms=fields.whole("time_limit_ms", 1, MOST_MS),
    )
    embedded = await call.answering.embed(ask, call.client)
    data = []
    for index, vector in enumerate(embedded.vectors):
        cut = shortened(vector, dimensions)
        data.append({"object": "embedding", "index": index, "embedding": _shown(cut, in_base64)})
    total = sum(embedded.tokens)
    return json_reply(
        {
            "object": "list",
            "data": data,
            "model": embedded.model,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }
    )


def read_dimensions(fields: Fields) -> int | None:
    """Read the wanted length of each embedding; None: the model's own."""
    return fields.whole("dimensions", 1, _MOST_DIMENSIONS)


def read_texts(fields: Fields, name: str) -> tuple[str | tuple[int, ...], ...]:
    """Read a text, token ids, or a list of texts and lists of token ids; none may be empty."""
    prompts = read_prompts(fields, name)
    if not all(prompts):
        raise fields.wrong(name, "texts that are not empty")
    return tuple(prompt for prompt in prompts if isinstance(prompt, str | tuple))


def shortened(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first `dimensions` values of a vector `[E]`, scaled to length 1 again.

    Raises:
        RequestError: the vector has fewer values.
    """
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise RequestError(
            "invalid_request",
            f"`dimensions` is {dimensions}; the model's embeddings have {len(vector)}",
            param="dimensions",
        )
    cut = vector[:dimensions].astype(np.float64)
    return (cut / (float(np.linalg.norm(cut)) or 1.0)).astype(np.float32)


def _shown(vector: NDArray[np.float32], in_base64: bool) -> Any:
    if in_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


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
    scores = await call.answering.rerank(ask, call.client)
    results: list[dict[str, Any]] = []
    for each in ranked(scores.values, top_n):
        result: dict[str, Any] = {"index": each.index, "relevance_score": each.relevance}
        if with_documents:
            result["document"] = shown[each.index]
        results.append(result)
    return json_reply(
        {
            "id": f"rerank-{secrets.token_hex(12)}",
            "object": "list",
            "model": scores.model,
            "results": results,
            "usage": {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens},
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


ROUTES = (
    Route("/v1/embeddings", {"POST": embeddings}),
    Route("/embeddings", {"POST": embeddings}),
    *(
        Route(path, {"POST": rerank})
        for path in ("/v1/rerank", "/v2/rerank", "/v1/reranking", "/rerank", "/reranking")
    ),
)
