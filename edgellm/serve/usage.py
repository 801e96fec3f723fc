"""Token counts, timings and times of answers, in forms that several dialects share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from edgellm.results import FinishReason, Piece, Stats

# OpenAI's finish reason for each of edgellm's: by itself, or by a limit.
FINISH: Mapping[FinishReason, str] = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "time": "length",
    "repetition": "length",
    "cancelled": "stop",
}


def reasoning_tokens(pieces: Iterable[Piece]) -> int:
    """Count the tokens of reasoning; tokens whose text was held back are not counted."""
    return sum(piece.token is not None and bool(piece.reasoning) for piece in pieces)


def usage(answers: Sequence[Stats], *, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return OpenAI's `usage` object for all answers to one prompt, which counts once."""
    prompt = answers[0].prompt_tokens if answers else 0
    generated = sum(stats.generation_tokens for stats in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens if answers else 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def timings(stats: Stats) -> dict[str, Any]:
    """Return llama.cpp's `timings` object of an answer, in milliseconds."""
    computed = stats.prompt_tokens - stats.cached_tokens
    decoded = max(stats.generation_tokens - 1, 0)  # the first token comes from prefill
    prompt = _timing("prompt", computed, computed, stats.prompt_tokens_per_second)
    rate = stats.generation_tokens_per_second
    predicted = _timing("predicted", stats.generation_tokens, decoded, rate)
    drafts = {}
    if stats.drafted_tokens:  # as llama.cpp: without a draft there is no field
        drafts = {"draft_n": stats.drafted_tokens, "draft_n_accepted": stats.accepted_tokens}
    return {"cache_n": stats.cached_tokens, **prompt, **predicted, **drafts}


def _timing(name: str, count: int, timed: int, rate: float) -> dict[str, Any]:
    milliseconds = 1000 * timed / rate if rate > 0 else 0.0
    return {
        f"{name}_n": count,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(1000 / rate, 3) if rate > 0 else 0.0,
        f"{name}_per_second": round(rate, 3),
    }


def placement(stats: Stats) -> dict[str, Any]:
    """Return the providers and precisions that computed an answer, and its waiting times."""
    return {
        "prefill": dict(stats.prefill),
        "prefill_precision": stats.prefill_precision,
        "decode": stats.decode,
        "scheduling": stats.scheduling,
        "seed": stats.seed,
        "queued_ms": round(1000 * stats.queued_s, 3),
        "ttft_ms": round(1000 * stats.ttft_s, 3),
        "preempted": stats.preempted,
        "dropped_tokens": stats.dropped_tokens,
        "evicted_tokens": stats.evicted_tokens,
        "drafts": {name: asdict(counts) for name, counts in stats.drafts.items()},
        "draft_failure": stats.draft_failure,
    }


def timestamp(moment: datetime) -> str:
    """Format a time in UTC by RFC 3339."""
    return moment.isoformat().replace("+00:00", "Z")
