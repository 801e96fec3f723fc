"""From logits to an answer: sampled tokens, and their text piece by piece."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows
from edgellm.backends.trace import TaskRecord
from edgellm.cache.eviction import evicted_tokens
from edgellm.cache.prefix_index import CacheEnd
from edgellm.engine.loaded_model import LoadedModel
from edgellm.engine.sampling import Sampler, best_needed
from edgellm.engine.speculation import Speculation
from edgellm.errors import OptionError
from edgellm.generation_options import GenerationOptions
from edgellm.kernels.experts import ExpertMemory, ExpertUse
from edgellm.kernels.sampling import Logits
from edgellm.machine import peak_memory_bytes
from edgellm.results import FinishReason, Piece, Stats
from edgellm.text.marker_reader import hold_back
from edgellm.text.tokenizer import TextStream, Tokenizer


class StopText:
    """A filter that lets text through until a stop text; a possible beginning of one is held back.

    Args:
        stops: the stop texts.
        min_indent: minimum indent in characters; a line that is indented less, and is not blank,
            stops the text as well, at the line end before it. 0: no such stop.

    Attributes:
        stopped: whether the text has been stopped.
        stop: the stop text found; None if a line that is indented less stopped the text.
    """

    def __init__(self, stops: Sequence[str], *, min_indent: int = 0) -> None:
        self._stops = tuple(stops)
        less = max(0, min_indent - 1)
        self._outdent = re.compile(rf"\n[ \t]{{0,{less}}}[^ \t\r\n]") if min_indent else None
        self._indent = re.compile(rf"\n[ \t]{{0,{less}}}\Z") if min_indent else None
        self._held = ""
        self.stopped = False
        self.stop: str | None = None

    def add(self, text: str) -> str:
        """Take a piece of text, and return the text that is safe to show; "" after a stop."""
        if self.stopped:
            return ""
        self._held += text
        hits: list[tuple[int, str | None]] = [
            (at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        outdent = self._outdent and self._outdent.search(self._held)
        if outdent:
            hits.append((outdent.start(), None))
        if hits:
            at, self.stop = min(hits, key=lambda hit: hit[0])
            self.stopped = True
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._unfinished()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """End the text, and return the part that was held back and is no stop text."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self) -> int:
        """Return the length of the longest end of the held text that may begin a stop."""
        indent = self._indent and self._indent.search(self._held)
        at_line_start = len(self._held) - indent.start() if indent else 0
        return max(hold_back(self._held, self._stops), at_line_start)


class LogitFilter(Protocol):
    """A function that says at each step which tokens may come next.

    It is called with the scores `[V]` of all tokens, float32, and the tokens of the answer so far.
    It either changes the scores in place, such as to -inf for a token that must not come next, and
    returns None; or it returns the scores to go on with, an array of the same shape.
    """

    def __call__(
        self, scores: NDArray[np.float32], tokens: Sequence[int], /
    ) -> NDArray[np.float32] | None: ...


def filtered_scores(
    logit_filter: LogitFilter, scores: NDArray[np.float32], tokens: Sequence[int]
) -> NDArray[np.float32]:
    """Apply a filter and return the scores that it leaves; it may change `scores`.

    Raises:
        OptionError: it returned neither None nor a float array of the same shape.
    """
    left = logit_filter(scores, tokens)
    if left is None:
        return scores
    fits = isinstance(left, np.ndarray) and left.shape == scores.shape
    if not fits or left.dtype.kind != "f":
        shape = getattr(left, "shape", None)
        raise OptionError(
            f"`logit_filter` returned {type(left).__name__}{'' if shape is None else f' {shape}'}; "
            f"return a NumPy array of floats of the shape {scores.shape}, or change the scores in "
            "place and return None"
        )
    return scores if left is scores else left.astype(np.float32)  # a copy, it may be kept


@runtime_checkable
class FilterOfAnswers(Protocol):
    """A logit filter that keeps something of the answer it is called for."""

    def for_answer(self) -> LogitFilter:
        """Return a filter for one answer, apart from those of other answers on their way."""


class Answer:
    """Tokens of one answer, drawn from logits and turned into pieces.

    Args:
        context: tokens before the answer.
        shown_special: see `TextStream`.

    Attributes:
        sampled: tokens of the answer so far.
        best_needed: see `best_needed` in `sampling.py`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: GenerationOptions,
        context: Sequence[int],
        *,
        logit_filter: LogitFilter | None,
        shown_special: Collection[int] = (),
    ) -> None:
        if isinstance(logit_filter, FilterOfAnswers):
            logit_filter = logit_filter.for_answer()
        self.sampled: list[int] = []
        self._options = options
        self._logit_filter = logit_filter
        self._ends = tokenizer.eos_ids | set(options.stop_tokens)
        self._sampler = Sampler(options, tokenizer)
        self._stop = StopText(options.stop, min_indent=options.min_indent)
        endless = options.max_tokens is None and not options.ignore_eos
        self._repetition_limit = options.repetition_limit if endless else 0
        self._text = TextStream(tokenizer, context, shown_special=shown_special)
        self._line_deadline = math.inf
        self.best_needed = 0 if logit_filter else best_needed(options, ends=len(self._ends))

    def draw(self, logits: Logits, tokens: Sequence[int]) -> int:
        """Draw the token after `tokens`, which are the context and the answer so far.

        Raises:
            OptionError: no token is left to choose.
            NumericError: the logits are not finite.
        """
        banned = () if self._options.may_end(len(self.sampled)) else sorted(self._ends)
        scores = self._filtered(logits)
        return self._sampler.sample(scores, tokens, ids=logits.ids, banned=banned)

    def add(self, token: int, logits: Logits) -> Piece:
        """Add a drawn token to the answer, and return its piece."""
        if not self.sampled and self._options.line_limit_ms is not None:
            self._line_deadline = time.perf_counter() + self._options.line_limit_ms / 1000
        self.sampled.append(token)
        logprob = logits.log_probability(token)
        top = logits.best(self._options.logprobs) or None
        if token in self._ends:
            rest = self.rest()
            return Piece(rest, token, logprob, top, "stop", stop_text=self._stop.stop)
        text = self._stop.add(self._text.add(token))
        reason: FinishReason | None = "stop" if self._stop.stopped else None
        if reason is None and "\n" in text and time.perf_counter() > self._line_deadline:
            reason, text = "time", text + self.rest()
        return Piece(text, token, logprob, top, reason, stop_text=self._stop.stop)

    def rest(self) -> str:
        """Return the text held back, at the end of the answer."""
        return self._stop.add(self._text.finish()) + self._stop.finish()

    def limit(self) -> FinishReason | None:
        """Return why no token may follow; None if one may."""
        if self.sampled and len(self.sampled) == self._options.max_tokens:
            return "length"
        return "repetition" if loops(self.sampled, self._repetition_limit) else None

    def _filtered(self, logits: Logits) -> NDArray[np.float32]:
        if self._logit_filter is None:
            return logits.scores
        scores = filtered_scores(self._logit_filter, logits.scores.copy(), self.sampled)
        if scores.max() == -math.inf < logits.scores.max():
            raise OptionError("`logit_filter` ruled out every token; at least one must be left")
        return scores


# Repetitions that make a loop, and number of tokens after which a loop is looked for again.
_TIMES = 4
_EVERY = 16


def loops(tokens: Sequence[int], limit: int) -> bool:
    """Whether the last `limit` tokens repeat one sequence, at least four times; 0: never.

    It looks after every 16th token.
    """
    if not limit or len(tokens) < limit or len(tokens) % _EVERY:
        return False
    return shortest_period(tokens[-limit:]) * _TIMES <= limit


def shortest_period(tokens: Sequence[int]) -> int:
    """Find the smallest p with `tokens[i] == tokens[i - p]` for all i >= p (Knuth-Morris-Pratt)."""
    borders = [0] * len(tokens)  # of each prefix: its longest proper suffix that is also a prefix
    border = 0
    for i in range(1, len(tokens)):
        while border and tokens[i] != tokens[border]:
            border = borders[border - 1]
        border += tokens[i] == tokens[border]
        borders[i] = border
    return len(tokens) - border


class AnswerStats:
    """Collector of the timings and counts in `Stats`.

    Attributes:
        start: time at which the answer was asked for, on the clock of `time.perf_counter`.
        cached: number of prompt tokens not computed for it; None until it is begun.
        computed: number of computed prompt tokens, with those that were lost and computed again.
        steps: number of decode steps and of accepted draft tokens.
        dropped: number of tokens that a full context has forgotten.
        preempted: number of times that the answer gave its place to others.
    """

    def __init__(
        self, prompt_tokens: int, *, dropped: int = 0, experts: ExpertMemory | None = None
    ) -> None:
        self._experts = experts
        self._used_before = ExpertUse() if experts is None else experts.use
        self.start = time.perf_counter()
        self.cached: int | None = None
        self.computed = self.steps = self.preempted = 0
        self.dropped = dropped
        self._prompt_tokens = prompt_tokens
        self._prefill_s = self._decode_s = self._ttft_s = self._queued_s = 0.0
        self._cache_end: CacheEnd = "new"
        self._places: dict[str, int] = {}
        self._tasks: list[TaskRecord] = []

    def begun(self, cached: int, end: CacheEnd) -> None:
        """Note that the answer has a place in the KV cache; no effect after a preemption."""
        if self.cached is None:
            self.cached, self._cache_end = cached, end
            self._queued_s = time.perf_counter() - self.start
            if self._experts is not None:
                self._used_before = self._experts.use

    def first_token(self) -> None:
        self._ttft_s = time.perf_counter() - self.start

    def decoded(self, seconds: float) -> None:
        """Count a step that computed the token sampled last."""
        self._decode_s += seconds
        self.steps += 1

    def prefilled(self, rows: Rows, seconds: float) -> None:
        """Count a step that computed rows of the prompt."""
        self.rested(rows, seconds)
        self.computed += len(rows.hidden)
        for place, count in rows.places.items():
            self._places[place] = self._places.get(place, 0) + count

    def rested(self, rows: Rows, seconds: float) -> None:
        """Count a step that brought rows of the prompt through some of the layers."""
        self._prefill_s += seconds
        first = 1 + max((task.chunk for task in self._tasks), default=-1)
        self._tasks.extend(replace(task, chunk=first + task.chunk) for task in rows.tasks)

    def result(
        self, engine: LoadedModel, speculation: Speculation, *, tokens: int, seed: int
    ) -> Stats:
        """Return the statistics so far; `tokens`: number of sampled tokens."""
        drafts = dict(speculation.counts)  # which the engine's thread may change meanwhile
        return Stats(
            ttft_s=self._ttft_s,
            queued_s=self._queued_s,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached or 0,
            cache_end=self._cache_end,
            prompt_tokens_per_second=_rate(self.computed, self._prefill_s),
            generation_tokens=tokens,
            generation_tokens_per_second=_rate(self.steps, self._decode_s),
            peak_memory_bytes=peak_memory_bytes(),
            prefill=dict(self._places) or {engine.prefill.placement.provider: 0},
            prefill_precision=engine.prefill.precision,
            decode=f"{engine.decoder.name} {engine.decoder.precision}",
            seed=seed,
            scheduling=engine.scheduling,
            drafted_tokens=sum(each.drafted for each in drafts.values()),
            accepted_tokens=sum(each.accepted for each in drafts.values()),
            drafts=drafts,
            draft_failure=speculation.failure,
            dropped_tokens=self.dropped,
            evicted_tokens=evicted_tokens(
                engine.cache.policy, self._prompt_tokens - self.dropped + tokens
            ),
            preempted=self.preempted,
            experts=None if self._experts is None else self._experts.use.since(self._used_before),
            tasks=tuple(self._tasks),
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
