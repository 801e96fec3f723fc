"""Routes of OpenAI: models, Mistral's fill-in-the-middle, and those of other files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from edgellm.errors import EdgeLLMError
from edgellm.generation_options import GenerationArguments
from edgellm.serve.adapters import ServedAdapter
from edgellm.serve.ask import Ask, Infill
from edgellm.serve.events import Begun, Delta, Event, PromptProgress
from edgellm.serve.http.endpoint import Call, Dialect, Route, framed
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import BodyReply, Comment, Frame, Frames, Reply, json_reply
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.openai import chat, completions, embeddings, responses
from edgellm.serve.openai.chat import AskedChat, Identity, chat_object
from edgellm.serve.openai.messages import error_body
from edgellm.serve.openai.sampling import max_tokens, sampling_arguments
from edgellm.serve.request_error import RequestError
from edgellm.serve.usage import FINISH, placement, timestamp, timings, usage
from edgellm.text.fim import Gap


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


async def fim_completions(call: Call) -> Reply:
    """Fill a gap, and reply in the form of chats."""
    fields = await call.fields()
    ask = read_fim(fields)
    if fields.flag("stream"):
        return call.stream(fim_frames(call.events(ask)))
    begun, answers = await call.answers(ask)
    return json_reply(chat_object(begun, answers, AskedChat(ask=ask)))


def read_fim(fields: Fields) -> Ask:
    """Read the ask of a request: greedy, as in `LLM.infill`, unless `temperature` is given."""
    arguments: GenerationArguments = {
        "temperature": 0.0,
        **sampling_arguments(fields),
        **max_tokens(fields, "max_tokens"),
    }
    seed = fields.whole("random_seed", 0, 2**64 - 1)
    if seed is not None:
        arguments["seed"] = seed
    gap = Gap(prefix=fields.required_text("prompt"), suffix=fields.text("suffix") or "")
    return Ask(model=fields.text("model"), prompt=Infill(gap=gap), arguments=arguments)


def fim_frames(events: AsyncGenerator[Event, None]) -> Frames:
    """Convert an ask's events to chunks, all with a choice and a text: editors check neither."""
    identity: Identity

    def of(event: Event) -> list[Frame | Comment]:
        nonlocal identity
        if isinstance(event, Begun):
            identity = Identity(event.model)
            return [Comment("")]  # the reply begins
        if isinstance(event, PromptProgress):
            return []
        if isinstance(event, Delta):
            return [_chunk(identity, event.text, None)] if event.text else []
        stats = event.stats
        return [
            _chunk(
                identity,
                "",
                FINISH[event.finish_reason],
                usage=usage([stats]),
                timings=timings(stats),
                placement=placement(stats),
            )
        ]

    return framed(events, of, lambda: [Frame("[DONE]")])


def _chunk(identity: Identity, text: str, reason: str | None, **more: object) -> Frame:
    delta = {"role": "assistant", "content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return Frame(identity.object("chat.completion.chunk", [choice], **more))


async def list_models(call: Call) -> Reply:
    """Return the models, with the fields that Mistral's and llama.cpp's clients read.

    Anthropic's clients, which use the same path, get Anthropic's form.
    """
    pool = call.answering.pool
    if _is_anthropic(call):
        return json_reply(_anthropic_page(call))
    names = [*pool.ids, *pool.adapters.all]
    return json_reply({"object": "list", "data": [_model(pool, name) for name in names]})


async def show_model(call: Call) -> Reply:
    pool = call.answering.pool
    name = call.path_values["model"]
    id = name if name in pool.adapters.all else pool.resolve(name)
    if _is_anthropic(call):
        return json_reply(_anthropic_model(call, id))
    return json_reply(_model(pool, id))


def _model(pool: ModelPool, name: str) -> dict[str, Any]:
    """Describe a model, or an adapter with its model as `parent`, as in vLLM."""
    id = pool.resolve(name)
    model: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": pool.started_at,
        "owned_by": "edgellm",
        "status": {"value": "loaded" if id in pool.loaded() else "unloaded"},
        "type": "base",  # Mistral's client reads only base and fine-tuned models
        "capabilities": {},
    }
    if id != name:
        model["parent"] = id
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
    pool = call.answering.pool
    ids = [*pool.ids, *pool.adapters.all]
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
    card = pool.known(pool.resolve(id))
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


OPENAI = Dialect(
    name="openai",
    routes=[
        *chat.ROUTES,
        *completions.ROUTES,
        Route("/v1/fim/completions", {"POST": fim_completions}),
        Route("/fim/completions", {"POST": fim_completions}),
        *embeddings.ROUTES,
        Route("/v1/models", {"GET": list_models}),
        Route("/models", {"GET": list_models}),
        Route("/v1/models/{model:path}", {"GET": show_model}),
        Route("/v1/load_lora_adapter", {"POST": load_adapter}),
        Route("/v1/unload_lora_adapter", {"POST": unload_adapter}),
    ],
    error_body=error_body,
)
RESPONSES = Dialect(
    name="responses",
    routes=responses.ROUTES,
    error_body=error_body,
    error_frames=responses.error_frames,
)
