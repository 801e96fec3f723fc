"""OpenAI's `/v1/models`, with what Mistral's client reads of it, and llama.cpp's."""

from __future__ import annotations

from typing import Any

from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.model_pool import ModelPool


async def list_models(call: Call) -> Reply:
    pool = call.answering.pool
    return json_reply({"object": "list", "data": [_model(pool, id) for id in pool.ids]})


async def show_model(call: Call) -> Reply:
    pool = call.answering.pool
    return json_reply(_model(pool, pool.resolve(call.path_values["model"])))


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


ROUTES = (
    Route("/v1/models", {"GET": list_models}),
    Route("/models", {"GET": list_models}),
    Route("/v1/models/{model:path}", {"GET": show_model}),
)
