"""llama.cpp's `/props`, `/slots` and `/lora-adapters`: properties and state of the server.

edgellm has no slots: any number of answers share the KV cache. It shows as many slots as whole
contexts fit into the cache, or as requests are running if these are more.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version

from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.llama_cpp.answer import settings
from edgellm.serve.model_card import ModelCard, card_of
from edgellm.serve.request_error import RequestError


async def props(call: Call) -> Reply:
    """Return the properties of the model in the URL's parameter `model`, else of the first one."""
    pool = call.answering.pool
    model = pool.resolve(call.query("model"))
    card = await _card(call, model)
    return json_reply(
        {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": card.ctx_size,
                "params": settings(card.options, seed=None),
            },
            "total_slots": card.slots,
            "model_alias": model,
            "model_path": card.name.rpartition("/")[2],
            "modalities": {"vision": False, "audio": False},
            "chat_template": card.template,
            "chat_template_caps": {"supports_tools": card.takes_tools},
            "bos_token": card.bos,
            "eos_token": card.eos,
            "build_info": f"edgellm {_version()}",
            "is_sleeping": model not in pool.loaded(),
        }
    )


async def slots(call: Call) -> Reply:
    """Return the slots of a model; with `fail_on_no_slot`, an error if none is free."""
    card = await _card(call, call.query("model"))
    running = call.answering.metrics.running
    if call.query("fail_on_no_slot") and running >= card.slots:
        raise RequestError("unavailable", "no slot available", retry_after_s=1)
    return json_reply(
        [
            {
                "id": number,
                "n_ctx": card.ctx_size,
                "speculative": True,
                "is_processing": number < running,
            }
            for number in range(max(card.slots, running))
        ]
    )


async def _card(call: Call, model: str | None) -> ModelCard:
    """Return the card of a model.

    A model that would have to be downloaded or exported is loaded, as llama.cpp's router does.
    """
    pool = call.answering.pool
    card = await pool.card(model)
    if card is None:
        async with pool.use(model) as llm:
            card = await asyncio.to_thread(card_of, llm.engine)
    return card


async def change_slot(call: Call) -> Reply:
    raise RequestError(
        "not_supported",
        "This server has no slots to save, restore or erase: what prompts have in common with "
        "earlier ones is found in the KV cache by itself",
    )


async def change_props(call: Call) -> Reply:
    raise RequestError("not_supported", "This server does not support changing global properties.")


async def adapters(call: Call) -> Reply:
    return json_reply([])


async def change_adapters(call: Call) -> Reply:
    raise RequestError("not_supported", "This server has no LoRA adapters loaded.")


def _version() -> str:
    try:
        return version("edgellm")
    except PackageNotFoundError:
        return ""


ROUTES = (
    Route("/props", {"GET": props, "POST": change_props}),
    Route("/slots", {"GET": slots}),
    Route("/slots/{id}", {"POST": change_slot}),
    Route("/lora-adapters", {"GET": adapters, "POST": change_adapters}),
)
