"""Ollama's `/api/tags`, `/api/ps`, `/api/show` and `/api/version`; what it is to be found by."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from edgellm.engine.loaded_model import planned_memory
from edgellm.errors import UnsupportedModelError
from edgellm.graphs.tensors import parameters
from edgellm.serve.endpoint import Call, Handler, Route
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.request_error import RequestError
from edgellm.serve.streaming import Reply, json_reply
from edgellm.text.fim import require_family

if TYPE_CHECKING:
    from edgellm.llm import LLM

# The Ollama whose API this is: clients refuse older ones.
API_VERSION = "0.12.11"
_NEVER = "9999-12-31T23:59:59Z"
# Longer than anybody waits, and within what dates hold.
_LONGEST_S = 1e9


async def version(call: Call) -> Reply:
    return json_reply({"version": API_VERSION})


async def tags(call: Call) -> Reply:
    pool = call.answering.pool
    return json_reply({"models": [_listed(pool, id) for id in pool.ids]})


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
    fields = await call.fields()
    name = fields.text("model") or fields.text("name")
    async with call.answering.pool.use(name) as llm:
        described = await asyncio.to_thread(_described, llm, call.answering.pool.resolve(name))
    pool = call.answering.pool
    return json_reply(
        {
            "modified_at": _time(pool.started_at),
            "details": _details(llm),
            **described,
        }
    )


async def usable_model(call: Call, name: str | None, wanted: Sequence[str]) -> LLM:
    """A model, loaded, that can do what is wanted.

    Args:
        wanted: names of capabilities.

    Raises:
        RequestError: it cannot.
    """
    async with call.answering.pool.use(name) as llm:
        can = await asyncio.to_thread(_capabilities, llm)
        for capability in wanted:
            if capability not in can:
                id = call.answering.pool.resolve(name)
                raise RequestError(
                    "not_supported", f"{id!r} does not support {capability}", param="model"
                )
        return llm


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _after(seconds: float) -> str:
    """The time in so many seconds."""
    if seconds > _LONGEST_S:
        return _NEVER
    moment = datetime.now(UTC) + timedelta(seconds=seconds)
    return moment.isoformat().replace("+00:00", "Z")


def _listed(pool: ModelPool, id: str) -> dict[str, Any]:
    llm = pool.loaded().get(id)
    name = id if ":" in id.rpartition("/")[2] else f"{id}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": _time(pool.started_at),
        "size": 0 if llm is None else _bytes(llm),
        # of the name: a file's is not known before it is loaded
        "digest": hashlib.sha256(id.encode()).hexdigest(),
        "details": _details(llm),
    }


def _bytes(llm: LLM) -> int:
    """What it takes when its cache is full, as estimated."""
    engine = llm.engine
    estimate = planned_memory(engine.bundle, engine.options, engine.precisions)
    return estimate.weights + estimate.kv_cache


def _details(llm: LLM | None) -> dict[str, Any]:
    """What is known of a model; of one that is not loaded, nothing."""
    if llm is None:
        family = size = precision = ""
    else:
        family = llm.engine.config.model_type
        size = _rounded(parameters(llm.engine.config))
        precision = llm.engine.decoder.precision
    return {
        "parent_model": "",
        "format": "edgellm",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": size,
        "quantization_level": precision,
    }


def _rounded(count: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)


def _described(llm: LLM, id: str) -> dict[str, Any]:
    engine, config = llm.engine, llm.engine.config
    family, template = config.model_type, engine.template
    options = llm.generation_options()
    return {
        "modelfile": f"FROM {id}\n",
        "parameters": "".join(
            f"{name} {getattr(options, name)}\n"
            for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
        ),
        "template": _gap_template(llm) + (template.source if template is not None else ""),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": parameters(config),
            # what this server holds, which clients ask for as `num_ctx`
            f"{family}.context_length": llm.ctx_size,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.layer_count,
            f"{family}.attention.head_count": config.heads,
            f"{family}.attention.head_count_kv": config.kv_heads,
            f"{family}.vocab_size": config.vocab_size,
        },
        "capabilities": _capabilities(llm),
    }


def _capabilities(llm: LLM) -> list[str]:
    """What a model can do, as Ollama names it."""
    template, can = llm.engine.template, ["completion"]
    if template is not None and template.traits.takes_tools and template.answer_format.calls:
        can.append("tools")
    if _gap_template(llm):
        can.append("insert")
    if template is not None and template.answer_format.reasoning is not None:
        can.append("thinking")
    return can


def _gap_template(llm: LLM) -> str:
    """How the model is asked to fill a gap, in Ollama's terms: clients look for `.Suffix`."""
    tokenizer = llm.engine.tokenizer
    try:
        family = require_family(tokenizer.vocabulary, tokenizer.fim, model=llm.name)
    except UnsupportedModelError:
        return ""
    prefix, suffix = f"{family.prefix}{{{{ .Prompt }}}}", f"{family.suffix}{{{{ .Suffix }}}}"
    parts = suffix + prefix if family.order == "spm" else prefix + suffix
    return f"{{{{ if .Suffix }}}}{parts}{family.middle or ''}{{{{ end }}}}"


def _refused(what: str) -> Handler:
    async def refuse(call: Call) -> Reply:
        raise RequestError(
            "not_supported",
            f"{what}: models are not changed over HTTP; name those to serve when you start the "
            "server: `edgellm serve MODEL...`",
        )

    return refuse


ROUTES = (
    Route("/api/version", {"GET": version}),
    Route("/api/tags", {"GET": tags}),
    Route("/api/ps", {"GET": ps}),
    Route("/api/show", {"POST": show}),
    *(
        Route(f"/api/{name}", {"POST": _refused(name)})
        for name in ("pull", "push", "create", "copy")
    ),
    Route("/api/delete", {"DELETE": _refused("delete")}),
    Route("/api/blobs/{digest}", {"GET": _refused("blobs"), "POST": _refused("blobs")}),
)
