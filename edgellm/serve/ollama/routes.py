"""Routes of Ollama: embeddings, and those of other files; and the form of its errors."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edgellm.serve.ask import EmbeddingAsk
from edgellm.serve.events import Embeddings
from edgellm.serve.http.endpoint import Call, Dialect, Route
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import JSON, Reply, json_reply
from edgellm.serve.ollama import chat, models
from edgellm.serve.ollama.messages import read_keep_alive
from edgellm.serve.openai.embeddings import read_dimensions, shortened
from edgellm.serve.openai.sampling import MOST_MS
from edgellm.serve.request_error import RequestError

_MOST_TEXTS = 2048


async def embed(call: Call) -> Reply:
    started = time.perf_counter()
    fields = await call.fields()
    dimensions = read_dimensions(fields)
    texts = fields.texts("input", _MOST_TEXTS)
    if texts != [""] and not all(texts):
        raise fields.wrong("input", "texts that are not empty")
    truncates = fields.flag("truncate") is not False
    given = [text for text in texts if text]
    embedded = await _embedded(call, fields, given, truncates=truncates)
    vectors = [shortened(vector, dimensions).tolist() for vector in embedded.vectors]
    return json_reply(
        {
            "model": fields.text("model") or embedded.model,
            "embeddings": vectors,
            "total_duration": int((time.perf_counter() - started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(embedded.tokens),
        }
    )


async def embeddings(call: Call) -> Reply:
    fields = await call.fields()
    prompt = fields.text("prompt")
    embedded = await _embedded(call, fields, [prompt] if prompt else [], truncates=True)
    return json_reply({"embedding": embedded.vectors[0].tolist() if embedded.vectors else []})


async def _embedded(
    call: Call, fields: Fields, texts: Sequence[str], *, truncates: bool
) -> Embeddings:
    """Embed texts; without texts, only load the model.

    Args:
        truncates: whether a text that is too long for the context is cut.
    """
    pool, model = call.answering.pool, fields.text("model")
    keep_alive_s = read_keep_alive(fields)
    ask = EmbeddingAsk(
        model=model,
        prompts=tuple(texts),
        truncates=truncates,
        time_limit_ms=fields.whole("time_limit_ms", 1, MOST_MS),
    )
    try:
        if texts:
            return await call.answering.embed(ask, call.client)
        async with pool.use(model):
            return Embeddings(pool.resolve(model), [], [])
    finally:
        pool.keep(model, keep_alive_s)


def error_body(error: RequestError) -> JSON:
    if error.code == "model_not_found":
        return {"error": f"model not found: {error.message}"}
    return {"error": error.message}


OLLAMA = Dialect(
    name="ollama",
    routes=[
        *chat.ROUTES,
        Route("/api/embed", {"POST": embed}),
        Route("/api/embeddings", {"POST": embeddings}),
        *models.ROUTES,
    ],
    error_body=error_body,
    owns=lambda path: path.startswith("/api/"),
)
