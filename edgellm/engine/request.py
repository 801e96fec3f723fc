"""An answer on its way: what it still wants computed, and what it makes of the logits."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows, Span
from edgellm.backends.trace import TaskRecord
from edgellm.engine.context import Context
from edgellm.engine.memory import peak_memory_bytes
from edgellm.engine.repetition import RepetitionGuard
from edgellm.engine.sampling import Sampler, best_will_do
from edgellm.engine.speculation import Speculation
from edgellm.errors import OptionError
from edgellm.generation_options import GenerationOptions
from edgellm.kernels.sampling import Logits
from edgellm.progress import Progress, ProgressCallback
from edgellm.results import FinishReason, Piece, Stats
from edgellm.text.stop_text import StopText
from edgellm.text.tokenizer import TextStream

# Sets the scores of tokens that must not come next to -inf; called with the tokens sampled so far.
LogitFilter = Callable[[NDArray[np.float32], SequenceOf[int]], None]
# Pieces that nobody has asked for yet, beyond which an answer waits for its reader.
_MOST_UNREAD = 64


class Request:
    """One `Session.stream` call, in the hands of the loop.

    Everything here but `pieces`, `error` and `withdrawn` is the loop's, which calls it under the
    engine's lock.

    Attributes:
        pieces: what the caller has not taken yet.
        error: what is raised when they are taken; there will be no more.
        forks: other answers to the same prompt, which begin where it ends.
        finished: whether the last piece is there, or an error.
        withdrawn: the caller is gone.
    """

    def __init__(
        self,
        context: Context,
        options: GenerationOptions,
        *,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        closes: bool = False,
    ) -> None:
        """Take over the tokens of `context` as the prompt.

        Args:
            closes: the context is closed with the end of the answer.
        """
        engine = context.engine
        self.context = context
        self._changes = context.changes
        self.priority = options.priority
        self._closes = closes
        self.pieces: deque[Piece] = deque()
        self.error: Exception | None = None
        self.forks: list[Request] = []
        self.finished = self.withdrawn = False
        self._engine = engine
        self._options = options
        self._cancel = cancel
        self._progress = progress
        self._logit_filter = logit_filter
        self._ends = engine.tokenizer.eos_ids | set(options.stop_tokens)
        self._sampler = Sampler(options, banned=sorted(self._ends) if options.ignore_eos else ())
        self._stop = StopText(options.stop, min_indent=options.min_indent)
        endless = options.max_tokens is None and not options.ignore_eos
        self._repetition = RepetitionGuard(options.repetition_limit if endless else 0)
        self._text = TextStream(engine.tokenizer, context.tokens)
        drafts = options.speculate and engine.decoder.exact_rows
        self._speculation = Speculation(context.tokens if drafts else None)
        self._best_will_do = logit_filter is None and best_will_do(options, ends=len(self._ends))
        self._sampled: list[int] = []
        self._start = time.perf_counter()
        self._deadline = math.inf
        if options.time_limit_ms is not None:
            self._deadline = self._start + options.time_limit_ms / 1000
        self._prompt_tokens = len(context.tokens)
        self._begun_s: float | None = None
        self._cached = self._computed = self._steps = self._dropped = 0
        self._prefill_s = self._decode_s = self._ttft_s = 0.0
        self._preempted = 0
        self._places: dict[str, int] = {}
        self._tasks: list[TaskRecord] = []

    # what the scheduler looks at

    @property
    def tokens(self) -> SequenceOf[int]:
        """The prompt, and what was sampled."""
        return self.context.tokens

    @property
    def computed(self) -> int:
        """How many of the tokens are in the KV cache; the last one is wanted for its logits."""
        return min(self.context.cached, len(self.tokens) - 1)

    @property
    def decoding(self) -> bool:
        """Whether only the token that was sampled last has to be computed."""
        return bool(self._sampled) and self.computed == len(self.tokens) - 1

    @property
    def paused(self) -> bool:
        """Whether it waits for its reader."""
        return len(self.pieces) >= _MOST_UNREAD

    @property
    def changed(self) -> bool:
        """Whether its session has become another one."""
        return self.context.changes != self._changes

    # what the loop does with it

    def check(self) -> None:
        """Refuse a prompt that no answer can begin with; see `Context.check_prompt`."""
        if self.context.answering:
            raise OptionError(
                "the session is already answering; finish or close that stream, or `fork` the "
                "session"
            )
        if self._options.context_policy == "error" or not self.tokens:
            self.context.check_prompt()
        self.context.answering = True

    def begin(self) -> None:
        """Take over the longest cached prefix, at the beginning and after a preemption.

        Raises:
            OptionError, ContextOverflowError: see `Context.check_prompt`.
            CacheFullError: what was given back does not fit any more.
        """
        self._make_room()
        self.context.check_prompt()
        cached = self.context.begin()
        if self._begun_s is None:
            self._begun_s = time.perf_counter() - self._start
            self._cached = cached

    def begin_at(self, other: Request) -> None:
        """Begin with the prompt of another request, of which nothing else is computed yet."""
        self.context.become(other.context)
        self._begun_s = time.perf_counter() - self._start
        self._cached = self.context.cached

    def preempt(self) -> None:
        """Give the blocks back until it is begun again."""
        self._preempted += 1
        self.context.give_back()

    def end_reason(self) -> FinishReason | None:
        """Why the answer is over before its next token, if it is."""
        if self._cancel is not None and self._cancel.is_set():
            return "cancelled"
        if time.perf_counter() >= self._deadline:
            return "time"
        return self._limit()

    def stop_now(self) -> bool:
        """Whether nobody needs the end of a step."""
        return self.withdrawn or self.end_reason() in ("cancelled", "time")

    def span(self, rows: int, *, alone: bool) -> Span:
        """The next `rows` tokens, and with them a draft where no other request is in the step.

        Raises:
            CacheFullError: a full context has no room to move up.
        """
        self._make_room()
        computed, end = self.computed, len(self.tokens)
        # a step that failed may have computed the last token and lost its logits
        self.context.forget(self.context.cached - computed)
        tokens = self.tokens[computed : computed + rows]
        last = computed + len(tokens) == end
        if not self.decoding:
            return Span(self.context.sequence, tokens, logit_rows=int(last))
        draft = self._speculation.draft(self._room()) if alone else []
        return Span(
            self.context.sequence,
            [*tokens, *draft],
            logit_rows=1 + len(draft),
            candidates=alone and self._best_will_do,
        )

    def take(self, rows: Rows, *, decoded: bool, alone: bool, seconds: float) -> None:
        """Go on with what a step computed of the request's span.

        Args:
            decoded: whether the span was the token sampled last, and its draft.
            alone: whether no other request was in the step.
            seconds: what the step took.
        """
        self._note(rows, decoded=decoded, seconds=seconds)
        logits = rows.logits
        if not logits:
            return
        if decoded:
            self._speculation.computed(logits[1:], seconds=seconds if alone else None)
        following: Logits | None = logits[0]
        while following is not None and not self.finished:
            self._sample(following)
            following = self._speculation.after(self._sampled[-1]) if self._sampled else None
            self._steps += following is not None
        self.context.forget(self._speculation.settle())

    def leave(self) -> None:
        """Give back what is not needed when the loop has done with it."""
        self.context.answering = False
        if self._closes:
            self.context.close_now()

    def finish(self, reason: FinishReason) -> None:
        """End it with the text that was held back."""
        self._put(Piece(self._held_back(), finish_reason=reason))

    def fail(self, error: Exception) -> None:
        """End it with an exception for the caller."""
        self.error = error
        self.finished = True

    def stats(self) -> Stats:
        """Timings and counts so far."""
        engine = self._engine
        return Stats(
            ttft_s=self._ttft_s,
            queued_s=self._begun_s or 0.0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            prompt_tokens_per_second=_rate(self._computed, self._prefill_s),
            generation_tokens=len(self._sampled),
            generation_tokens_per_second=_rate(self._steps, self._decode_s),
            peak_memory_bytes=peak_memory_bytes(),
            prefill=self._places or {engine.prefill.placement.provider: 0},
            prefill_precision=engine.prefill.precision,
            decode=f"{engine.decoder.name} {engine.decoder.precision}",
            seed=self._options.seed or 0,
            drafted_tokens=self._speculation.drafted,
            accepted_tokens=self._speculation.accepted,
            dropped_tokens=self._dropped,
            preempted=self._preempted,
            tasks=tuple(self._tasks),
        )

    def _note(self, rows: Rows, *, decoded: bool, seconds: float) -> None:
        """Count what a step computed."""
        if decoded:
            self._decode_s += seconds
            self._steps += 1
            return
        self._prefill_s += seconds
        self._computed += len(rows.hidden)
        for place, count in rows.places.items():
            self._places[place] = self._places.get(place, 0) + count
        first = 1 + max((task.chunk for task in self._tasks), default=-1)
        self._tasks.extend(replace(task, chunk=first + task.chunk) for task in rows.tasks)
        if self._progress is not None and len(rows.hidden):
            total = max(len(self.tokens) - self._cached, self._computed)
            self._progress(Progress("prefill", self._computed, total, "tokens"))

    def _make_room(self) -> None:
        """Go on in a full context, if that was asked for."""
        full = len(self.tokens) > self._engine.ctx_size
        if full and self._options.context_policy == "shift":
            self._dropped += self.context.make_room(self._options.keep)

    def _room(self) -> int:
        """Tokens that may come after the last one."""
        in_context = self._engine.ctx_size - len(self.tokens)
        limit = self._options.max_tokens
        return in_context if limit is None else min(in_context, limit - len(self._sampled))

    def _limit(self) -> FinishReason | None:
        limit = self._options.max_tokens
        full = len(self.tokens) > self._engine.ctx_size
        full = full and self._options.context_policy == "error"
        # a prompt is computed also where nothing is to be sampled
        none = limit == 0 and self.context.cached == len(self.tokens)
        if full or none or (self._sampled and len(self._sampled) == limit):
            return "length"
        return "repetition" if self._repetition.loops(self._sampled) else None

    def _sample(self, logits: Logits) -> None:
        """Draw a token, and put its piece there; and another one if it was the last."""
        reason = self.end_reason()
        if reason is not None:
            return self.finish(reason)
        piece = self._piece(logits)
        self._put(piece)
        reason = None if piece.finish_reason else self._limit()
        if reason is not None:
            self.finish(reason)

    def _piece(self, logits: Logits) -> Piece:
        scores = logits.scores
        if self._logit_filter is not None:
            scores = scores.copy()
            self._logit_filter(scores, self._sampled)
            if scores.max() == -math.inf < logits.scores.max():
                raise OptionError("`logit_filter` ruled out every token; at least one must be left")
        token = self._sampler.sample(scores, self.tokens, ids=logits.ids)
        if not self._sampled:
            self._ttft_s = time.perf_counter() - self._start
        self._sampled.append(token)
        self.context.extend(token)
        logprob = logits.log_probability(token)
        top = logits.best(self._options.logprobs) or None
        if token in self._ends:
            return Piece(self._held_back(), token, logprob, top, "stop")
        text = self._stop.add(self._text.add(token))
        reason: FinishReason | None = "stop" if self._stop.found else None
        return Piece(text, token, logprob, top, reason)

    def _put(self, piece: Piece) -> None:
        if piece.finish_reason is not None:
            piece = replace(piece, stats=self.stats())
        self.pieces.append(piece)
        self.finished = piece.finish_reason is not None

    def _held_back(self) -> str:
        return self._stop.add(self._text.finish()) + self._stop.finish()


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
