"""Routes of llama.cpp's server: its state, metrics and embeddings; and the form of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from edgellm.llm import LLM
from edgellm.serve.ask import EmbeddingAsk
from edgellm.serve.http.endpoint import Call, Dialect, Route
from edgellm.serve.http.streaming import JSON, BodyReply, Reply, json_reply
from edgellm.serve.llama_cpp import completion, text
from edgellm.serve.llama_cpp.answer import settings
from edgellm.serve.llama_cpp.fields import INT32_MAX, hard, unsupported
from edgellm.serve.llama_cpp.text import model_id
from edgellm.serve.metrics import Histogram, Metrics
from edgellm.serve.openai.embeddings import read_texts
from edgellm.serve.openai.messages import TYPES
from edgellm.serve.request_error import Kind, RequestError
from edgellm.serve.served import ModelCard, card_of

_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(call: Call) -> Reply:
    """Return Prometheus' text, under the names of llama.cpp and of vLLM that dashboards know."""
    if not call.answering.options.metrics:
        raise RequestError("not_supported", "This server does not support metrics endpoint.")
    loaded = call.answering.pool.loaded()
    text = "".join(_lines(call.answering.metrics, _usage(list(loaded.values()))))
    return BodyReply(text.encode(), _MEDIA_TYPE)


def _usage(models: list[LLM]) -> float:
    """Return the share of all loaded models' KV blocks that sequences hold, from 0 to 1."""
    groups = [group.pool for llm in models for group in llm.engine.cache.groups]
    total = sum(pool.used + pool.available for pool in groups)
    return sum(pool.used for pool in groups) / total if total else 0.0


def _lines(seen: Metrics, usage: float) -> Iterator[str]:
    yield from _llama_cpp(seen)
    yield from _vllm(seen, usage)


def _llama_cpp(seen: Metrics) -> Iterator[str]:
    computed = seen.prompt_tokens - seen.cached_tokens
    counters = {
        "prompt_tokens": (computed, "Prompt tokens processed."),
        "prompt_seconds": (seen.prompt_seconds, "Prompt process time in seconds."),
        "tokens_predicted": (seen.generation_tokens, "Generation tokens processed."),
        "tokens_predicted_seconds": (seen.generation_seconds, "Predict process time in seconds."),
    }
    for name, (value, meaning) in counters.items():
        yield from _simple(f"llamacpp:{name}_total", "counter", meaning, value)
    rate = seen.generation_tokens / seen.generation_seconds if seen.generation_seconds else 0.0
    gauges = {
        "prompt_tokens_seconds": (seen.prompt_tokens_per_second, "Prompt tokens/s on average."),
        "predicted_tokens_seconds": (rate, "Generation tokens/s on average."),
        "requests_processing": (seen.running, "Requests processing."),
        "requests_deferred": (seen.waiting, "Requests waiting for their first token."),
    }
    for name, (value, meaning) in gauges.items():
        yield from _simple(f"llamacpp:{name}", "gauge", meaning, value)


def _vllm(seen: Metrics, usage: float) -> Iterator[str]:
    gauges = {
        "num_requests_running": (seen.running, "Requests with a first token."),
        "num_requests_waiting": (seen.waiting, "Requests without one."),
        "kv_cache_usage_perc": (usage, "Share of the KV cache's blocks in use; 1 is all."),
    }
    for name, (value, meaning) in gauges.items():
        yield from _simple(f"vllm:{name}", "gauge", meaning, value)
    counters = {
        "prefix_cache_queries": (seen.prompt_tokens, "Prompt tokens looked for in the cache."),
        "prefix_cache_hits": (seen.cached_tokens, "Prompt tokens found there."),
        "num_preemptions": (seen.preempted, "Answers that gave their place to others."),
        "prompt_tokens": (seen.prompt_tokens, "Prompt tokens, cached ones included."),
        "prompt_tokens_cached": (seen.cached_tokens, "Cached prompt tokens."),
        "generation_tokens": (seen.generation_tokens, "Generated tokens."),
        "spec_decode_num_draft_tokens": (seen.drafted_tokens, "Tokens guessed ahead."),
        "spec_decode_num_accepted_tokens": (seen.accepted_tokens, "Right guesses among them."),
    }
    for name, (value, meaning) in counters.items():
        yield from _simple(f"vllm:{name}_total", "counter", meaning, value)
    yield from _labelled("vllm:request_success_total", "finished_reason", seen.finished)
    yield from _labelled("vllm:admission_rejections_total", "reason", seen.rejected)
    histograms = {
        "time_to_first_token_seconds": seen.first_token,
        "inter_token_latency_seconds": seen.between_tokens,
        "e2e_request_latency_seconds": seen.whole_answer,
        "request_queue_time_seconds": seen.queued,
    }
    for name, histogram in histograms.items():
        yield from _histogram(f"vllm:{name}", histogram)


def _simple(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {value:.10g}\n"


def _labelled(name: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {name} By {label}.\n# TYPE {name} counter\n"
    for key, value in sorted(values.items()):
        yield f'{name}{{{label}="{key}"}} {value}\n'


def _histogram(name: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {name} In seconds.\n# TYPE {name} histogram\n"
    total = 0
    for bound, count in zip([*histogram.bounds, None], histogram.counts, strict=True):
        total += count
        label = "+Inf" if bound is None else f"{bound:g}"
        yield f'{name}_bucket{{le="{label}"}} {total}\n'
    yield f"{name}_sum {histogram.sum:.10g}\n{name}_count {total}\n"


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
    """Return the slots of a model; with `fail_on_no_slot`, an error if none is free.

    edgellm has no slots: any number of answers share the KV cache. It shows as many slots as whole
    contexts fit into the cache, or as requests are running if these are more.
    """
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


async def load_model(call: Call) -> Reply:
    """Load a model, as llama.cpp's router does; its first request would do the same."""
    pool, name = call.answering.pool, (await call.fields()).required_text("model")
    pool.keep(name, None)
    async with pool.use(name):
        return json_reply({"success": True})


async def unload_model(call: Call) -> Reply:
    """Unload a model once it is idle, unless it is asked for again before."""
    call.answering.pool.unload((await call.fields()).required_text("model"))
    return json_reply({"success": True})


async def change_slot(call: Call) -> Reply:
    raise RequestError(
        "not_supported",
        "This server has no slots to save, restore or erase: what prompts have in common with "
        "earlier ones is found in the KV cache by itself",
    )


async def change_props(call: Call) -> Reply:
    raise RequestError("not_supported", "This server does not support changing global properties.")


async def adapters(call: Call) -> Reply:
    """Return the adapters of the first model, which requests name in `lora` or as their model."""
    pool = call.answering.pool
    return json_reply(
        [
            {"id": number, "path": name, "scale": adapter.scale}
            for number, (name, adapter) in enumerate(pool.adapters.of_model(pool.ids[0]))
        ]
    )


async def change_adapters(call: Call) -> Reply:
    raise RequestError(
        "not_supported",
        "This server changes no adapters for all requests; each names its own, in `lora` or as "
        "`model`",
    )


def _version() -> str:
    try:
        return version("edgellm")
    except PackageNotFoundError:
        return ""


# llama.cpp's number for the scaling of vectors to length 1.
_EUCLIDEAN = 2


async def embedding(call: Call) -> Reply:
    """Return a list of one vector for each text."""
    fields = await call.fields()
    if hard(fields, ("embd_normalize",), -1, INT32_MAX) not in (None, _EUCLIDEAN):
        raise unsupported("embd_normalize", "vectors are of length 1")
    texts = read_texts(fields, "input" if "input" in fields else "content")
    ask = EmbeddingAsk(model=model_id(call, fields), prompts=texts)
    embedded = await call.answering.embed(ask, call.client)
    return json_reply(
        [
            {"index": index, "embedding": [vector.tolist()]}
            for index, vector in enumerate(embedded.vectors)
        ]
    )


_TYPES: Mapping[Kind, str] = {
    **TYPES,
    "not_supported": "not_supported_error",
    "overloaded": "unavailable_error",
}


def error_status(error: RequestError) -> int:
    return 501 if error.kind == "not_supported" else error.status


def error_body(error: RequestError) -> JSON:
    return {
        "error": {
            "code": error_status(error),
            "message": error.message,
            "type": _TYPES.get(error.kind, "invalid_request_error"),
            **error.details,
        }
    }


LLAMA_CPP = Dialect(
    name="llama.cpp",
    routes=[
        *completion.ROUTES,
        Route("/embedding", {"POST": embedding}),
        *text.ROUTES,
        Route("/models/load", {"POST": load_model}),
        Route("/models/unload", {"POST": unload_model}),
        Route("/props", {"GET": props, "POST": change_props}),
        Route("/slots", {"GET": slots}),
        Route("/slots/{id}", {"POST": change_slot}),
        Route("/lora-adapters", {"GET": adapters, "POST": change_adapters}),
        Route("/metrics", {"GET": metrics}),
    ],
    error_body=error_body,
    status=error_status,
)
