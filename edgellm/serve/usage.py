"""Counts, timings and times, as several dialects show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from edgellm.results import FinishReason, Piece, Stats

# Why an answer ended, as OpenAI says it: by itself, or by a limit.
FINISH = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "time": "length",
    "repetition": "length",
    "cancelled": "stop",
}


def finish_reason(reason: FinishReason) -> str:
    return FINISH[reason]


def reasoning_tokens(pieces: Iterable[Piece]) -> int:
    """Tokens that were thoughts, without those held back for a moment."""
    return sum(piece.token is not None and bool(piece.reasoning) for piece in pieces)


def usage(answers: Sequence[Stats], *, reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's counts of all answers to one prompt, which counts once."""
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
    """llama.cpp's timings of an answer; times in milliseconds."""
    computed = stats.prompt_tokens - stats.cached_tokens
    decoded = max(stats.generation_tokens - 1, 0)  # the first token is the prompt's
    prompt = _timing("prompt", computed, computed, stats.prompt_tokens_per_second)
    rate = stats.generation_tokens_per_second
    predicted = _timing("predicted", stats.generation_tokens, decoded, rate)
    return {"cache_n": stats.cached_tokens, **prompt, **predicted}


def _timing(name: str, count: int, timed: int, rate: float) -> dict[str, Any]:
    milliseconds = 1000 * timed / rate if rate > 0 else 0.0
    return {
        f"{name}_n": count,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(1000 / rate, 3) if rate > 0 else 0.0,
        f"{name}_per_second": round(rate, 3),
    }


def placement(stats: Stats) -> dict[str, Any]:
    """Where an answer was computed, and what it waited for."""
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
    }


def timestamp(moment: datetime) -> str:
    """A time in UTC, as RFC 3339 has it."""
    return moment.isoformat().replace("+00:00", "Z")
