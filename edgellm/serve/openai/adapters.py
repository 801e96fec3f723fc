"""Adapters that clients add and drop, as in vLLM, where the server lets them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from edgellm.errors import EdgeLLMError
from edgellm.serve.adapters import ServedAdapter
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import BodyReply, Reply
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.request_error import RequestError


async def load_adapter(call: Call) -> Reply:
    """Serve an adapter; `base_model_name` chooses the model that it changes, else the first."""
    pool, fields = call.answering.pool, await call.fields()
    pool.adapters.check_managed()
    name, path = fields.required_text("lora_name"), fields.required_text("lora_path")
    model = pool.resolve(fields.text("base_model_name"))
    if name in pool.ids or name in pool.adapters.all:
        raise RequestError(
            "invalid_request", f"the name {name[:100]!r} is taken", param="lora_name"
        )
    # a client that goes away leaves no adapter that is in memory and not served
    adding = asyncio.create_task(_add(pool, name, ServedAdapter(model, path)))
    adding.add_done_callback(_retrieved)
    await asyncio.shield(adding)
    return _said(f"Success: LoRA adapter '{name}' added successfully.")


async def _add(pool: ModelPool, name: str, adapter: ServedAdapter) -> None:
    """Load an adapter, and serve it.

    Raises:
        RequestError: it cannot be loaded.
    """
    async with pool.use(adapter.model) as llm:
        try:
            await asyncio.to_thread(llm.load_adapter, name, adapter.path)
        except EdgeLLMError as error:
            raise RequestError("invalid_request", str(error), param="lora_path") from None
        pool.adapters.add(name, adapter)


def _retrieved(adding: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        adding.exception()  # the client may be gone


async def unload_adapter(call: Call) -> Reply:
    """Serve an adapter no longer; answers on their way with it go on to their end."""
    pool = call.answering.pool
    pool.adapters.check_managed()
    name = (await call.fields()).required_text("lora_name")
    adapter = pool.adapters.remove(name)
    if adapter is None:
        raise pool.unknown(name)
    llm = pool.loaded().get(adapter.model)
    if llm is not None and name in llm.adapters:
        llm.unload_adapter(name)
    return _said(f"Success: LoRA adapter '{name}' removed successfully.")


def _said(text: str) -> Reply:
    return BodyReply(text.encode(), "text/plain; charset=utf-8")


ROUTES = [
    Route("/v1/load_lora_adapter", {"POST": load_adapter}),
    Route("/v1/unload_lora_adapter", {"POST": unload_adapter}),
]
