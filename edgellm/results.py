"""Results of generation: pieces, finished answers and their statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgellm.backends.trace import TaskRecord, bubble_rate, write_trace
from edgellm.kernels.experts import ExpertUse
from edgellm.tool_use import ToolCall, ToolCallDelta, joined_calls

if TYPE_CHECKING:
    from edgellm.cache.prefix_index import CacheEnd

FinishReason = Literal["stop", "tool_calls", "length", "time", "repetition", "cancelled"]


@dataclass(frozen=True)
class DraftCounts:
    """Number of tokens that a drafter guessed, and of right guesses among them."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Stats:
    """Timings and counts of one answer.

    Attributes:
        ttft_s: time from the call to the first token, in seconds.
        prompt_tokens: number of tokens before the answer, cached ones included.
        cached_tokens: number of these that were found in the KV cache and not computed again.
        cache_end: reason why no more was found there: `whole` (all but the last token was),
            `new` (no cached prompt goes on from there), `differs` (those that do have other tokens
            there), `reused` (more followed, but its memory was needed for others),
            `scored` (log-probabilities of the rest were asked for).
        prompt_tokens_per_second: computed prompt tokens over the time of prefill; 0 without any.
        generation_tokens: number of sampled tokens, the end token included.
        generation_tokens_per_second: decode steps over their time; 0 without any.
        peak_memory_bytes: largest resident size of the process so far.
        prefill: number of tokens prefilled on each provider, e.g. `{"cpu": 41}`.
        prefill_precision: precision that computed the prompt.
        decode: back end and precision that computed the answer.
        seed: seed of the sampler.
        scheduling: scheduling in use for answers that are on their way at once.
        drafted_tokens, accepted_tokens: number of tokens guessed ahead, and of right guesses among
            them.
        drafts: the same of each drafter with a guess: `lookup` (in the answer's own tokens),
            `table` (of all answers), `model`, `mtp` (the model's own head, or its assistant).
        draft_failure: name of a drafter that failed or had to stay out, and why, where the answer
            went on without it; else "".
        dropped_tokens: number of tokens forgotten because the context was full.
        evicted_tokens: number of tokens behind the first ones that `kv_budget` had left out at the
            end.
        queued_s: part of `ttft_s` before the prompt was begun, because other answers were first.
        preempted: number of times that the answer gave its place in the KV cache to others for a
            while.
        experts: experts found in memory and read while the answer was on its way, also for other
            answers; None without `expert_memory`.
        tasks: records of the tasks that ran during prefill (see `trace.py`).
    """

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    prompt_tokens_per_second: float
    generation_tokens: int
    generation_tokens_per_second: float
    peak_memory_bytes: int
    prefill: Mapping[str, int]
    prefill_precision: str
    decode: str
    seed: int
    cache_end: CacheEnd = "new"
    scheduling: str = "stall_free"
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: Mapping[str, DraftCounts] = field(default_factory=dict)
    draft_failure: str = ""
    dropped_tokens: int = 0
    evicted_tokens: int = 0
    queued_s: float = 0.0
    preempted: int = 0
    experts: ExpertUse | None = None
    tasks: tuple[TaskRecord, ...] = field(default=(), repr=False)

    def write_trace(self, path: Path) -> None:
        """Write the tasks of prefill and their times, for chrome://tracing or ui.perfetto.dev.

        Raises:
            OptionError: the file cannot be written.
        """
        write_trace(path, self.tasks)

    def to_json(self) -> dict[str, Any]:
        """Return all fields but `tasks`, and the accelerator's idle share of their time."""
        values = asdict(replace(self, tasks=()))
        del values["tasks"]
        return {**values, "bubble_rate": bubble_rate(self.tasks)}


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token of a prompt.

    Attributes:
        logprob: natural logarithm of the token's probability behind the tokens before it; None for
            the first token.
        rank: 1 for the most likely token in its place; None for the first token.
        top: the most likely tokens in its place and their logprobs, as many as were asked for.
    """

    token: int
    logprob: float | None = None
    rank: int | None = None
    top: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Counts of what `LLM.compose` and `Session.replace` copy and compute.

    Attributes:
        copied_tokens: number of tokens whose K and V were copied from where they stood.
        computed_tokens: number of all other tokens, computed in place at the latest by the first
            answer.
        alone_tokens: number of tokens that were computed alone before, as they were not cached.
    """

    copied_tokens: int
    computed_tokens: int
    alone_tokens: int


@dataclass(frozen=True)
class Condensed:
    """Outcome of `Session.condense`.

    Attributes:
        tokens: number of leading tokens of which rows of K and V were dropped.
        keep: share of their rows that is left.
    """

    tokens: int
    keep: float


@dataclass(frozen=True)
class RankedDocument:
    """A document with its relevance to a query.

    Attributes:
        index: place of the document among those that were given.
        relevance: from 0 to 1, or a cosine from -1 to 1, where it is that of embeddings.
    """

    index: int
    relevance: float


def ranked(relevance: Sequence[float], top_n: int | None) -> list[RankedDocument]:
    """Return the `top_n` most relevant documents, the most relevant first; None: all."""
    order = sorted(range(len(relevance)), key=lambda index: -relevance[index])
    return [RankedDocument(index, relevance[index]) for index in order[:top_n]]


@dataclass(frozen=True)
class Piece:
    """A step of an answer.

    Attributes:
        text: text that can be shown now; empty while a character or a stop text is unfinished.
        token: the sampled token; None for text that was only held back.
        logprob: natural logarithm of the token's probability before any filter.
        top_logprobs: the most likely tokens and their logprobs, as many as were asked for.
        finish_reason: None but in the last piece. stop: an end token or stop text; tool_calls: an
            end token or stop text behind tool calls; length: `max_tokens` or the end of the
            context; time: `time_limit_ms` or `line_limit_ms`; repetition: `repetition_limit`;
            cancelled: the caller stopped the answer.
        stats: statistics of the whole answer, in the last piece.
        stop_text: stop text that ended the answer, in the last piece, if one did.
        reasoning: part of the reasoning before the answer that can be shown now; not in `text`.
        tool_calls: parts of tool calls that can be shown now.
        prompt_logprobs: one for each token of the prompt, in a piece before the answer's first
            token, if they were asked for.
    """

    text: str
    token: int | None = None
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    stop_text: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes:
        text: the answer without stop text and end token.
        tokens: all sampled tokens, the end token included.
        logprobs: one logprob for each token.
        finish_reason, stop_text: see `Piece`.
        reasoning: reasoning before the answer of a chat, if there was any.
        tool_calls: tool calls in the answer of a chat. The arguments of a call that was cut off, or
            that the model got wrong, are no JSON.
        prompt_logprobs: see `Piece`.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stats: Stats
    stop_text: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def completion(pieces: Sequence[Piece]) -> Completion:
    """Join all pieces of an answer."""
    last = pieces[-1]
    assert last.finish_reason is not None
    assert last.stats is not None
    return Completion(
        text="".join(piece.text for piece in pieces),
        tokens=tuple(piece.token for piece in pieces if piece.token is not None),
        logprobs=tuple(piece.logprob for piece in pieces if piece.logprob is not None),
        finish_reason=last.finish_reason,
        stats=last.stats,
        stop_text=last.stop_text,
        reasoning="".join(piece.reasoning for piece in pieces) or None,
        tool_calls=joined_calls([call for piece in pieces for call in piece.tool_calls]),
        prompt_logprobs=tuple(each for piece in pieces for each in piece.prompt_logprobs),
    )
