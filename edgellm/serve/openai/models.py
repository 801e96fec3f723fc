"""OpenAI's `/v1/models`, with the fields that Mistral's and llama.cpp's clients read.

Anthropic's clients, which use the same paths, get Anthropic's form.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.usage import timestamp


async def list_models(call: Call) -> Reply:
    pool = call.answering.pool
    if _is_anthropic(call):
        return json_reply(_anthropic_page(call))
    return json_reply({"object": "list", "data": [_model(pool, id) for id in pool.ids]})


async def show_model(call: Call) -> Reply:
    pool = call.answering.pool
    id = pool.resolve(call.path_values["model"])
    if _is_anthropic(call):
        return json_reply(_anthropic_model(call, id))
    return json_reply(_model(pool, id))


def _model(pool: ModelPool, id: str) -> dict[str, Any]:
    model: dict[str, Any] = {
        "id": id,
        "object": "model",
        "created": pool.started_at,
        "owned_by": "edgellm",
        "type": "base",  # Mistral's client reads only base and fine-tuned models
        "capabilities": {},
    }
    card = pool.known(id)
    if card is not None:
        config = card.config
        model["capabilities"] = {
            "completion_chat": bool(card.template),
            "completion_fim": card.infill is not None,
            "function_calling": card.calls_tools,
            "reasoning": card.reasons,
        }
        model["max_context_length"] = card.ctx_size
        model["meta"] = {
            "n_ctx": card.ctx_size,
            "n_ctx_train": config.context_length,
            "n_embd": config.hidden_size,
            "n_vocab": config.vocab_size,
        }
    return model


def _is_anthropic(call: Call) -> bool:
    """Whether an Anthropic client asks, whose paths for models are the same."""
    return call.header("anthropic-version") is not None


def _anthropic_page(call: Call) -> dict[str, Any]:
    """Return a page of models: at most `limit` of them, between `after_id` and `before_id`."""
    ids = list(call.answering.pool.ids)
    after, before, limit = (call.query(name) for name in ("after_id", "before_id", "limit"))
    if after in ids:
        ids = ids[ids.index(after) + 1 :]
    if before in ids:
        ids = ids[: ids.index(before)]
    most = int(limit) if limit is not None and limit.isdecimal() and len(limit) < 10 else len(ids)
    page = ids[:most]
    return {
        "data": [_anthropic_model(call, id) for id in page],
        "has_more": len(page) < len(ids),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _anthropic_model(call: Call, id: str) -> dict[str, Any]:
    pool, most = call.answering.pool, call.answering.options.max_tokens
    card = pool.known(id)
    size = None if card is None else card.ctx_size
    return {
        "type": "model",
        "id": id,
        "display_name": id if card is None else card.name,
        "created_at": timestamp(datetime.fromtimestamp(pool.started_at, UTC)),
        "lifecycle": "active",
        "max_input_tokens": size,
        "max_tokens": min((each for each in (size, most) if each is not None), default=None),
    }


ROUTES = (
    Route("/v1/models", {"GET": list_models}),
    Route("/models", {"GET": list_models}),
    Route("/v1/models/{model:path}", {"GET": show_model}),
)
