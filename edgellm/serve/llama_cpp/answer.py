"""Answers in the form of llama.cpp's server: one object, or a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from edgellm.generation_options import GenerationOptions
from edgellm.results import FinishReason, Piece, Stats
from edgellm.serve.events import Begun, Delta, End, Event, PromptProgress
from edgellm.serve.http.endpoint import Answered
from edgellm.serve.http.streaming import Comment, Frame, Frames
from edgellm.serve.openai.logprobs import token_logprob
from edgellm.serve.usage import placement, timings


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Parts of an answer that a client wants to see.

    Attributes:
        tokens: whether token ids are shown in a whole answer.
        probabilities: whether the log probabilities of tokens are shown.
        progress: whether chunks show the progress of prefill.
        timings: whether each chunk has timings.
        fields: slash-separated paths of the values to keep in the whole answer or the last chunk;
            None keeps all.
        id_slot: slot number that the client sent, which is only shown again.
        first: index of the first answer to this prompt among all answers of the request.
    """

    tokens: bool = False
    probabilities: bool = False
    progress: bool = False
    timings: bool = False
    fields: tuple[str, ...] | None = None
    id_slot: int = 0
    first: int = 0


@dataclass
class _Count:
    """Tokens and texts of an answer that have been streamed so far."""

    tokens: list[Piece] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    started_at: float = 0.0


def result_object(begun: Begun, answer: Answered, shown: Shown, *, index: int) -> dict[str, Any]:
    result = _result(
        begun, answer.pieces, answer.text, answer.finish_reason, answer.stats, shown, index=index
    )
    result["content"] = answer.text
    result["tokens"] = _ids(answer.pieces) if shown.tokens else []
    if shown.probabilities:
        result["completion_probabilities"] = _probabilities(answer.pieces, begun)
    return _selected(result, shown.fields)


async def frames(events: AsyncGenerator[Event, None], shown: Shown) -> Frames:
    """Convert the events of an ask to chunks; no `[DONE]` follows them."""
    counts: dict[int, _Count] = {}
    begun: Begun | None = None
    progress = PromptProgress(0, 0)
    since = time.perf_counter()
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Begun):
                begun, since = event, time.perf_counter()
                yield Comment("begun")
                continue
            assert begun is not None
            if isinstance(event, PromptProgress):
                progress = event
                if shown.progress:
                    seconds = time.perf_counter() - since
                    yield Frame(_progress_chunk(begun, event, shown, seconds=seconds))
                else:
                    yield Comment(f"prompt {event.done}/{event.total}")
                continue
            count = counts.setdefault(event.sample, _Count(started_at=time.perf_counter()))
            if isinstance(event, Delta):
                count.tokens += [piece for piece in event.pieces if piece.token is not None]
                count.text.append(event.text)
                yield Frame(_chunk(begun, event, shown, count, progress))
            else:
                yield Frame(_last_chunk(begun, event, shown, count))


def _chunk(
    begun: Begun, delta: Delta, shown: Shown, count: _Count, progress: PromptProgress
) -> dict[str, Any]:
    chunk: dict[str, Any] = {
        "index": shown.first + delta.sample,
        "content": delta.text,
        "tokens": _ids(delta.pieces),
        "stop": False,
        "id_slot": shown.id_slot,
        "tokens_predicted": len(count.tokens),
        "tokens_evaluated": len(begun.prompt),
    }
    if shown.timings:
        chunk["timings"] = _timings_so_far(begun, count, progress)
    if shown.probabilities:
        chunk["completion_probabilities"] = _probabilities(delta.pieces, begun)
    return chunk


def _progress_chunk(
    begun: Begun, progress: PromptProgress, shown: Shown, *, seconds: float
) -> dict[str, Any]:
    total = len(begun.prompt)
    cached = max(0, total - progress.total)
    return {
        "index": shown.first,
        "content": "",
        "tokens": [],
        "stop": False,
        "id_slot": shown.id_slot,
        "tokens_predicted": 0,
        "tokens_evaluated": total,
        "prompt_progress": {
            "total": total,
            "cache": cached,
            "processed": cached + progress.done,
            "time_ms": round(1000 * seconds),
        },
    }


def _last_chunk(begun: Begun, end: End, shown: Shown, count: _Count) -> dict[str, Any]:
    text = "".join(count.text)
    result = _result(
        begun,
        count.tokens,
        text,
        end.finish_reason,
        end.stats,
        shown,
        index=shown.first + end.sample,
    )
    return _selected({**result, "content": "", "tokens": []}, shown.fields)


def _timings_so_far(begun: Begun, count: _Count, progress: PromptProgress) -> dict[str, Any]:
    """Return the timings of an unfinished answer; only the last chunk has the prompt's times."""
    decoded = max(0, len(count.tokens) - 1)
    seconds = time.perf_counter() - count.started_at
    return {
        "cache_n": max(0, len(begun.prompt) - progress.total),
        "prompt_n": progress.total,
        "predicted_n": len(count.tokens),
        "predicted_ms": round(1000 * seconds, 3),
        "predicted_per_token_ms": round(1000 * seconds / decoded, 3) if decoded else 0.0,
        "predicted_per_second": round(decoded / seconds, 3) if seconds > 0 else 0.0,
    }


def _result(
    begun: Begun,
    pieces: Sequence[Piece],
    text: str,
    reason: FinishReason,
    stats: Stats,
    shown: Shown,
    *,
    index: int,
) -> dict[str, Any]:
    """Return the object that ends an answer, with empty `content` and `tokens`."""
    stop_type, word = _stop(begun, pieces, reason)
    count = stats.generation_tokens
    cut = reason == "length" and count != begun.options.max_tokens
    return {
        "index": index,
        "content": "",
        "tokens": [],
        "id_slot": shown.id_slot,
        "stop": True,
        "model": begun.model,
        "tokens_predicted": count,
        "tokens_evaluated": stats.prompt_tokens,
        "generation_settings": settings(begun.options, seed=stats.seed),
        "prompt": begun.engine.tokenizer.decode(begun.prompt, skip_special=False),
        "has_new_line": "\n" in text,
        "truncated": cut or stats.dropped_tokens > 0,
        "stop_type": stop_type,
        "stopping_word": word,
        "tokens_cached": stats.prompt_tokens + max(0, count - 1),
        "timings": timings(stats),
        "placement": placement(stats),
    }


def _stop(begun: Begun, pieces: Sequence[Piece], reason: FinishReason) -> tuple[str, str]:
    """Return llama.cpp's `stop_type` and `stopping_word` of an answer."""
    last = next((piece for piece in reversed(pieces) if piece.token is not None), None)
    if reason != "stop" or last is None:
        return "limit", ""
    if last.stop_text is not None:
        return "word", last.stop_text
    ends = begun.engine.tokenizer.eos_ids | set(begun.options.stop_tokens)
    return ("eos" if last.token in ends else "limit"), ""


# Options that have the same names here and in llama.cpp.
_SAMPLING = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "min_keep",
)  # fmt: skip


def settings(options: GenerationOptions, *, seed: int | None) -> dict[str, Any]:
    """Return the generation options of an answer under llama.cpp's names."""
    return {
        "n_predict": -1 if options.max_tokens is None else options.max_tokens,
        "seed": -1 if seed is None else seed,
        "n_indent": options.min_indent,
        "n_probs": options.logprobs,
        "t_max_predict_ms": options.line_limit_ms or -1,
        "ignore_eos": options.ignore_eos,
        "stop": list(options.stop),
        **{name: getattr(options, name) for name in _SAMPLING},
        "dry_sequence_breakers": list(options.dry_sequence_breakers),
        "samplers": list(options.samplers),
    }


def _ids(pieces: Sequence[Piece]) -> list[int]:
    return [piece.token for piece in pieces if piece.token is not None]


def _probabilities(pieces: Sequence[Piece], begun: Begun) -> list[dict[str, Any]]:
    """Return each token's log probability, with the most probable tokens of its step."""
    tokenizer = begun.engine.tokenizer
    return [
        {
            "id": piece.token,
            **token_logprob(tokenizer, piece.token, piece.logprob),
            "top_logprobs": [
                {"id": token, **token_logprob(tokenizer, token, logprob)}
                for token, logprob in (piece.top_logprobs or {}).items()
            ],
        }
        for piece in pieces
        if piece.token is not None
    ]


def _selected(result: dict[str, Any], paths: tuple[str, ...] | None) -> dict[str, Any]:
    """Select the values at these paths, each under its whole path; absent ones are left out."""
    if not paths:
        return result
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = result
        for key in path.split("/"):
            if not isinstance(value, Mapping) or key not in value:
                break
            value = value[key]
        else:
            selected[path] = value
    return selected
