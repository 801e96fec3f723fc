"""`/metrics` in Prometheus' text format, under the metric names of llama.cpp and of vLLM.

Dashboards and load generators know these names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgellm.llm import LLM
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import BodyReply, Reply
from edgellm.serve.metrics import Histogram, Metrics
from edgellm.serve.request_error import RequestError

_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(call: Call) -> Reply:
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
    for name, (value, text) in counters.items():
        yield from _simple(f"llamacpp:{name}_total", "counter", text, value)
    rate = seen.generation_tokens / seen.generation_seconds if seen.generation_seconds else 0.0
    gauges = {
        "prompt_tokens_seconds": (seen.prompt_tokens_per_second, "Prompt tokens/s on average."),
        "predicted_tokens_seconds": (rate, "Generation tokens/s on average."),
        "requests_processing": (seen.running, "Requests processing."),
        "requests_deferred": (seen.waiting, "Requests waiting for their first token."),
    }
    for name, (value, text) in gauges.items():
        yield from _simple(f"llamacpp:{name}", "gauge", text, value)


def _vllm(seen: Metrics, usage: float) -> Iterator[str]:
    gauges = {
        "num_requests_running": (seen.running, "Requests with a first token."),
        "num_requests_waiting": (seen.waiting, "Requests without one."),
        "kv_cache_usage_perc": (usage, "Share of the KV cache's blocks in use; 1 is all."),
    }
    for name, (value, text) in gauges.items():
        yield from _simple(f"vllm:{name}", "gauge", text, value)
    counters = {
        "prefix_cache_queries": (seen.prompt_tokens, "Prompt tokens looked for in the cache."),
        "prefix_cache_hits": (seen.cached_tokens, "Prompt tokens found there."),
        "num_preemptions": (seen.preempted, "Answers that gave their place to others."),
        "prompt_tokens": (seen.prompt_tokens, "Prompt tokens, cached ones included."),
        "prompt_tokens_cached": (seen.cached_tokens, "Cached prompt tokens."),
        "generation_tokens": (seen.generation_tokens, "Generated tokens."),
    }
    for name, (value, text) in counters.items():
        yield from _simple(f"vllm:{name}_total", "counter", text, value)
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


ROUTES = (Route("/metrics", {"GET": metrics}),)
