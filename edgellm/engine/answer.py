"""One answer: from the logits of the prompt to the last piece of text."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.trace import TaskRecord
from edgellm.engine.context import Context
from edgellm.engine.memory import peak_memory_bytes
from edgellm.engine.prefill import Hooks
from edgellm.engine.repetition import RepetitionGuard
from edgellm.engine.sampling import Sampler, best_will_do
from edgellm.engine.speculation import Speculation
from edgellm.errors import CancelledError, OptionError
from edgellm.generation_options import GenerationOptions
from edgellm.kernels.sampling import Logits, log_sum_exp
from edgellm.progress import ProgressCallback
from edgellm.results import FinishReason, Piece, Stats
from edgellm.text.stop_text import StopText
from edgellm.text.tokenizer import TextStream

Floats = NDArray[np.float32]
# Sets the scores of tokens that must not come next to -inf; called with the tokens sampled so far.
LogitFilter = Callable[[NDArray[np.float32], SequenceOf[int]], None]


class Answer:
    """The state of one `Session.stream` call."""

    def __init__(self, context: Context, options: GenerationOptions) -> None:
        self._engine = engine = context.engine
        self._context = context
        self._options = options
        self._ends = engine.tokenizer.eos_ids | set(options.stop_tokens)
        self._sampler = Sampler(options, banned=sorted(self._ends) if options.ignore_eos else ())
        self._stop = StopText(options.stop, min_indent=options.min_indent)
        endless = options.max_tokens is None and not options.ignore_eos
        self._repetition = RepetitionGuard(options.repetition_limit if endless else 0)
        self._text = TextStream(engine.tokenizer, context.tokens)
        self._start = time.perf_counter()
        self._prompt_tokens = len(context.tokens)
        self._cached = self._computed = 0
        self._prefill_s = self._decode_s = self._ttft_s = 0.0
        self._steps = self._dropped = 0
        self._sampled: list[int] = []
        drafts = options.speculate and engine.decoder.exact_rows
        self._speculation = Speculation(
            context.steps, context.forget, context.tokens if drafts else None
        )
        self._best_will_do = best_will_do(options, ends=len(self._ends))
        self._places: dict[str, int] = {}
        self._tasks: list[TaskRecord] = []

    def run(
        self,
        cancel: threading.Event | None,
        progress: ProgressCallback | None,
        logit_filter: LogitFilter | None,
    ) -> Iterator[Piece]:
        cancel = _Limit(cancel, self._start, self._options.time_limit_ms)
        self._make_room()
        self._cached = self._context.find_prefix()
        began = time.perf_counter()
        try:
            hooks = Hooks(
                progress=progress,
                cancel=cancel,
                on_place=self._count,
                on_tasks=self._tasks.extend,
            )
            logits: Floats | Logits = self._context.prefill(hooks)
        except CancelledError:
            yield Piece("", finish_reason=cancel.reason)
            return
        finally:
            self._prefill_s = time.perf_counter() - began
            self._computed = self._context.cached - self._cached
        while True:
            reason = self._limit(cancel)
            if reason is not None:
                yield Piece(self._held_back(), finish_reason=reason)
                return
            piece = self._sample(_with_sum(logits), logit_filter)
            yield piece
            if piece.finish_reason is not None:
                return
            if self._limit(None) is None:
                began = time.perf_counter()
                self._make_room()
                logits = self._after(
                    self._sampled[-1], best=self._best_will_do and logit_filter is None
                )
                self._decode_s += time.perf_counter() - began
                self._steps += 1

    def _after(self, token: int, *, best: bool) -> Floats | Logits:
        """The logits after a token that was sampled; `best`: the best of them will do."""
        logits = self._context.best(token) if best else None
        return self._speculation.after(token, room=self._room()) if logits is None else logits

    def _make_room(self) -> None:
        """Go on in a full context, if that was asked for."""
        full = len(self._context.tokens) > self._engine.ctx_size
        if full and self._options.context_policy == "shift":
            self._dropped += self._context.make_room(self._options.keep)

    def _room(self) -> int:
        """Tokens that may come after the last one."""
        in_context = self._engine.ctx_size - len(self._context.tokens)
        limit = self._options.max_tokens
        return in_context if limit is None else min(in_context, limit - len(self._sampled))

    def _count(self, place: str, tokens: int) -> None:
        self._places[place] = self._places.get(place, 0) + tokens

    def _limit(self, cancel: _Limit | None) -> FinishReason | None:
        if cancel is not None and cancel.is_set():
            return cancel.reason
        limit = self._options.max_tokens
        full = len(self._context.tokens) > self._engine.ctx_size
        full = full and self._options.context_policy == "error"
        if full or len(self._sampled) == limit:
            return "length"
        return "repetition" if self._repetition.loops(self._sampled) else None

    def _sample(self, logits: Logits, logit_filter: LogitFilter | None) -> Piece:
        scores = logits.scores
        if logit_filter is not None:
            scores = scores.copy()
            logit_filter(scores, self._sampled)
            if scores.max() == -math.inf < logits.scores.max():
                raise OptionError("`logit_filter` ruled out every token; at least one must be left")
        token = self._sampler.sample(scores, self._context.tokens, ids=logits.ids)
        if not self._sampled:
            self._ttft_s = time.perf_counter() - self._start
        self._sampled.append(token)
        self._context.extend(token)
        logprob = logits.log_probability(token)
        top = logits.best(self._options.logprobs) or None
        if token in self._ends:
            return Piece(self._held_back(), token, logprob, top, "stop")
        text = self._stop.add(self._text.add(token))
        reason: FinishReason | None = "stop" if self._stop.found else None
        return Piece(text, token, logprob, top, reason)

    def _held_back(self) -> str:
        return self._stop.add(self._text.finish()) + self._stop.finish()

    def stats(self) -> Stats:
        return Stats(
            ttft_s=self._ttft_s,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            prompt_tokens_per_second=_rate(self._computed, self._prefill_s),
            generation_tokens=len(self._sampled),
            generation_tokens_per_second=_rate(self._steps, self._decode_s),
            peak_memory_bytes=peak_memory_bytes(),
            prefill=self._places or {self._engine.prefill.placement.provider: 0},
            prefill_precision=self._engine.prefill.precision,
            decode=f"{self._engine.decoder.name} {self._engine.decoder.precision}",
            seed=self._options.seed or 0,
            drafted_tokens=self._speculation.drafted,
            accepted_tokens=self._speculation.accepted,
            dropped_tokens=self._dropped,
            tasks=tuple(self._tasks),
        )


class _Limit(threading.Event):
    """Set when the caller's event is, or when the time is over."""

    def __init__(
        self, cancel: threading.Event | None, start: float, time_limit_ms: int | None
    ) -> None:
        super().__init__()
        self._cancel = cancel
        self._end = math.inf if time_limit_ms is None else start + time_limit_ms / 1000

    def is_set(self) -> bool:
        return self.reason == "cancelled" or time.perf_counter() >= self._end

    @property
    def reason(self) -> FinishReason:
        return "cancelled" if self._cancel is not None and self._cancel.is_set() else "time"


def _with_sum(logits: Floats | Logits) -> Logits:
    return logits if isinstance(logits, Logits) else Logits(logits, log_sum_exp(logits))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
