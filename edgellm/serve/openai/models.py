"""OpenAI's `/v1/models`, with what Mistral's client reads of it, and llama.cpp's; for Anthropic's
clients theirs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.model_pool import ModelPool


async def list_models(call: Call) -> Reply:
    pool = call.answering.pool
    if _is_anthropic(call):
        return json_reply(_anthropic_page(pool))
    return json_reply({"object": "list", "data": [_model(pool, id) for id in pool.ids]})


async def show_model(call: Call) -> Reply:
    pool = call.answering.pool
    id = pool.resolve(call.path_values["model"])
    if _is_anthropic(call):
        return json_reply(_anthropic_model(pool, id))
    return json_reply(_model(pool, id))


def _model(pool: ModelPool, id: str) -> dict[str, Any]:
    model: dict[str, Any] = {
        "id": id,
        "object": "model",
        "created": pool.started_at,
        "owned_by": "edgellm",
        "type": "base",  # Mistral's client reads no others but fine-tuned ones
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
    """Whether Anthropic's client asks, whose models have the same paths."""
    return call.header("anthropic-version") is not None


def _anthropic_page(pool: ModelPool) -> dict[str, Any]:
    return {
        "data": [_anthropic_model(pool, id) for id in pool.ids],
        "has_more": False,
        "first_id": pool.ids[0],
        "last_id": pool.ids[-1],
    }


def _anthropic_model(pool: ModelPool, id: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(pool.started_at, UTC).isoformat().replace("+00:00", "Z")
    card = pool.known(id)
    size = None if card is None else card.ctx_size
    return {
        "type": "model",
        "id": id,
        "display_name": id if card is None else card.name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": size,
        "max_tokens": size,
    }


ROUTES = (
    Route("/v1/models", {"GET": list_models}),
    Route("/models", {"GET": list_models}),
    Route("/v1/models/{model:path}", {"GET": show_model}),
)
