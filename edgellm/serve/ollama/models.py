"""Ollama's `/api/tags`, `/api/ps`, `/api/show`, `/api/version`, `/api/pull` and `/api/delete`.

Clients find the server and its models by these routes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from edgellm.graphs.tensors import parameters
from edgellm.progress import Progress
from edgellm.serve.http.endpoint import Call, Handler, Route
from edgellm.serve.http.streaming import Frame, Frames, Reply, json_reply
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.request_error import RequestError
from edgellm.serve.served import ModelCard
from edgellm.serve.usage import timestamp

# Version of Ollama with this API; clients refuse older versions.
API_VERSION = "0.12.11"
_NEVER = "9999-12-31T23:59:59Z"
# Seconds beyond which a model counts as loaded for ever; dates can still hold so long a time.
_LONGEST_S = 1e9


async def version(call: Call) -> Reply:
    return json_reply({"version": API_VERSION})


async def tags(call: Call) -> Reply:
    pool = call.answering.pool
    return json_reply({"models": [_listed(pool, id) for id in (*pool.ids, *pool.adapters.all)]})


async def ps(call: Call) -> Reply:
    pool = call.answering.pool
    models = [
        {
            **_listed(pool, id),
            "size_vram": 0,
            "expires_at": _after(pool.unloads_in(id)),
            "context_length": llm.ctx_size,
        }
        for id, llm in pool.loaded().items()
    ]
    return json_reply({"models": models})


async def show(call: Call) -> Reply:
    """Describe a model without loading it.

    Clients ask for every listed model, to learn its capabilities.
    """
    fields = await call.fields()
    pool = call.answering.pool
    id = pool.resolve(fields.text("model") or fields.text("name"))
    card = await pool.card(id)
    return json_reply(
        {
            "modelfile": f"FROM {id}\n",
            "modified_at": _time(pool.started_at),
            "details": _details(card),
            **_described(card),
        }
    )


async def usable_model(call: Call, name: str | None, wanted: Sequence[str]) -> ModelCard:
    """Load a model that has all wanted capabilities, and return its card.

    Args:
        wanted: Ollama's names of capabilities.

    Raises:
        RequestError: the model cannot be loaded, or lacks a capability.
    """
    pool = call.answering.pool
    async with pool.use(name):
        card = await pool.card(name)
    assert card is not None  # it is loaded
    can = _capabilities(card)
    for capability in wanted:
        if capability not in can:
            raise RequestError(
                "not_supported",
                f"{pool.resolve(name)!r} does not support {capability}",
                param="model",
            )
    return card


def now() -> str:
    """Return the current time in Ollama's form."""
    return timestamp(datetime.now(UTC))


def _time(seconds: float) -> str:
    return timestamp(datetime.fromtimestamp(seconds, UTC))


def _after(seconds: float) -> str:
    """Return the time in `seconds` from now; the year 9999 stands for never."""
    if seconds > _LONGEST_S:
        return _NEVER
    return timestamp(datetime.now(UTC) + timedelta(seconds=seconds))


def _listed(pool: ModelPool, id: str) -> dict[str, Any]:
    """Describe a model, or an adapter by its name."""
    model = pool.resolve(id)
    card = pool.known(model)
    name = id if ":" in id.rpartition("/")[2] else f"{id}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": _time(pool.started_at),
        "size": 0 if card is None else card.memory_bytes,
        # hash of the name: a file's is not known before it is loaded
        "digest": hashlib.sha256(id.encode()).hexdigest(),
        "details": _details(card, parent="" if model == id else model),
    }


def _details(card: ModelCard | None, *, parent: str = "") -> dict[str, Any]:
    """Return Ollama's `details` of a model, empty for a model without a card."""
    family = "" if card is None else card.config.model_type
    return {
        "parent_model": parent,
        "format": "edgellm",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if card is None else _rounded(parameters(card.config)),
        "quantization_level": "" if card is None else card.file_type,
    }


def _rounded(count: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)


def _described(card: ModelCard | None) -> dict[str, Any]:
    if card is None:
        return {"parameters": "", "template": "", "model_info": {}, "capabilities": ["completion"]}
    config, family = card.config, card.config.model_type
    attentions = config.attentions.values()
    return {
        "parameters": "".join(
            f"{name} {getattr(card.options, name)}\n"
            for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
        ),
        "template": _gap_template(card) + card.template,
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": parameters(config),
            # the context of this server, which clients send back as `num_ctx`
            f"{family}.context_length": card.ctx_size,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.layer_count,
            f"{family}.attention.head_count": _count(a.heads for a in attentions),
            f"{family}.attention.head_count_kv": _count(a.kv_heads for a in attentions),
            f"{family}.vocab_size": config.vocab_size,
        },
        "capabilities": _capabilities(card),
    }


def _count(layers: Iterable[int]) -> int | list[int]:
    """Return a number of all layers or, as GGUF files have it, one for each."""
    counts = list(layers)
    return counts[0] if len(set(counts)) == 1 else counts


def _capabilities(card: ModelCard) -> list[str]:
    """Return a model's capabilities under Ollama's names."""
    can = {
        "tools": card.calls_tools,
        "insert": card.infill is not None,
        "thinking": card.reasons,
    }
    return ["completion", *(name for name, has in can.items() if has)]


def _gap_template(card: ModelCard) -> str:
    """Return the template for filling a gap, in Ollama's syntax: clients look for `.Suffix`."""
    family = card.infill
    if family is None:
        return ""
    prefix, suffix = f"{family.prefix}{{{{ .Prompt }}}}", f"{family.suffix}{{{{ .Suffix }}}}"
    parts = suffix + prefix if family.order == "spm" else prefix + suffix
    return f"{{{{ if .Suffix }}}}{parts}{family.middle or ''}{{{{ end }}}}"


async def pull(call: Call) -> Reply:
    """Download a model and serve it, with a line for each progress; see `ModelPool.pull`."""
    fields = await call.fields()
    name = fields.text("model") or fields.required_text("name")
    name = name.removesuffix(":latest")
    call.answering.pool.check_pull(name)
    if fields.flag("stream") is False:
        await call.answering.pool.pull(name, lambda _: None)
        return json_reply({"status": "success"})
    return call.stream(_pulled(call, name), format="lines")


async def _pulled(call: Call, name: str) -> Frames:
    loop, reports = asyncio.get_running_loop(), asyncio.Queue[Progress | None]()

    def put(report: Progress | None) -> None:
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(reports.put_nowait, report)

    task = asyncio.create_task(call.answering.pool.pull(name, put))
    task.add_done_callback(lambda _: put(None))
    try:
        yield Frame({"status": "pulling manifest"})
        while (report := await reports.get()) is not None:
            digest = hashlib.sha256(f"{name} {report.label}".encode()).hexdigest()
            line = {"status": report.label, "digest": digest, "completed": report.done}
            yield Frame({**line, "total": report.total or report.done})
        await task
        yield Frame({"status": "success"})
    finally:
        if not task.cancel() and not task.cancelled():  # the pull itself goes on
            task.exception()  # retrieved, because the client may be gone


async def delete(call: Call) -> Reply:
    """Serve a model no longer; its files stay, for `edgellm rm`."""
    fields = await call.fields()
    call.answering.pool.forget(fields.text("model") or fields.required_text("name"))
    return json_reply({})


def _refused(what: str) -> Handler:
    async def refuse(call: Call) -> Reply:
        raise RequestError(
            "not_supported",
            f"{what}: models are not made over HTTP; `edgellm export` makes them",
        )

    return refuse


ROUTES = (
    Route("/api/version", {"GET": version}),
    Route("/api/tags", {"GET": tags}),
    Route("/api/ps", {"GET": ps}),
    Route("/api/show", {"POST": show}),
    Route("/api/pull", {"POST": pull}),
    Route("/api/delete", {"DELETE": delete}),
    *(Route(f"/api/{name}", {"POST": _refused(name)}) for name in ("push", "create", "copy")),
    Route("/api/blobs/{digest}", {"GET": _refused("blobs"), "POST": _refused("blobs")}),
)
