"""A request: an answer on its way, with its tokens, their state and its unread pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Backend, Rows, Span
from edgellm.engine.answer import Answer, AnswerStats
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.draft_policy import Choice
from edgellm.engine.plan import Arrival, Layers, Underway
from edgellm.engine.prefill_job import PrefillJob
from edgellm.engine.speculation import speculation
from edgellm.engine.stream import Stream
from edgellm.kernels.kv_blocks import BLOCK, DENSE_POSITIONS
from edgellm.kernels.sampling import Logits, log_sum_exp
from edgellm.kernels.sealed_blocks import first_choosing
from edgellm.progress import Progress
from edgellm.results import FinishReason, Piece, Stats, TokenLogprob

# Rows that go through the LM head at a time: a row of logits takes up to 1 MB.
_ROWS = 64


class PromptScores:
    """The log-probabilities of one prompt.

    Args:
        backend: back end whose LM head turns hidden states into logits.
        tokens: tokens of the prompt.
        top: number of most likely tokens to report in each place.

    Attributes:
        tokens: results so far, the first one without a score.
        complete: whether all tokens have theirs.
    """

    def __init__(self, backend: Backend, tokens: SequenceOf[int], *, top: int) -> None:
        self._backend = backend
        self._prompt = list(tokens)
        self._top = top
        self.tokens = [TokenLogprob(token) for token in self._prompt[:1]]
        self.complete = False

    @property
    def known(self) -> int:
        """Number of tokens whose states are not needed again."""
        return len(self.tokens) - 1

    def add(
        self, start: int, hidden: NDArray[np.float32], *, should_stop: Callable[[], bool]
    ) -> None:
        """Take the hidden states `[n, E]` of tokens from `start` on, which are not beyond `known`.

        Args:
            should_stop: function that tells, some rows at a time, that they are no longer needed.
        """
        assert start <= self.known
        hidden = hidden[self.known - start : len(self._prompt) - 1 - start]
        for begin in range(0, len(hidden), _ROWS):
            if should_stop():
                return
            for row in self._backend.logits(hidden[begin : begin + _ROWS]):
                self.tokens.append(self._scored(Logits(row, log_sum_exp(row))))
        self.complete = len(self.tokens) == len(self._prompt)

    def _scored(self, logits: Logits) -> TokenLogprob:
        token = self._prompt[len(self.tokens)]
        return TokenLogprob(
            token,
            logits.log_probability(token),
            rank=1 + int(np.count_nonzero(logits.scores > logits.scores[token])),
            top=logits.best(self._top),
        )


class Request(Stream):
    """An answer on its way; all but `check`, `stats` and what `Stream` has for readers is for the
    engine's thread.

    Attributes:
        forks: other answers to the same prompt, which begin where it ends.
        asked, may_rest: see `Schedulable`.
        job: rows of the prompt on their way; None: none.
    """

    def __init__(
        self,
        context: Context,
        call: Call,
        *,
        closes: bool = False,
        wants_reports: bool = False,
        shown_special: Collection[int] = (),
        dropped: int = 0,
    ) -> None:
        """Take over the tokens of `context` as the prompt.

        Args:
            dropped: number of prompt tokens that a shift has forgotten already.
            closes: whether the context is closed with the end of the answer.
            wants_reports: whether `report` is news for the reader, as pieces are.
            shown_special: see `TextStream`.

        Raises:
            OptionError: `options` names an adapter that is not loaded.
        """
        super().__init__(context, whole=call.whole)
        engine, options = context.engine, call.options
        adapter = engine.adapters.get(options.adapter)
        if context.answering is None:  # else `check` refuses to answer
            context.adapt(adapter)
        self.owner, self.priority = options.owner, options.priority
        self.forks: list[Request] = []
        self.asked: Arrival | None = None
        self.job: PrefillJob | None = None
        self.may_rest = True
        self._engine = engine
        self._options = options
        self._cancel = call.cancel
        self._progress = call.progress
        self._closes = closes
        self._wants_reports = wants_reports
        self._answer = Answer(
            engine.tokenizer,
            options,
            context.tokens,
            logit_filter=call.logit_filter,
            shown_special=shown_special,
        )
        self._speculation = speculation(engine, options, salt=context.salt)
        self._scores: PromptScores | None = None
        self._shortlists = engine.shortlists()
        if options.prompt_logprobs is not None:
            self._scores = PromptScores(engine.prefill, context.tokens, top=options.prompt_logprobs)
        self._stats = AnswerStats(
            len(context.tokens) + dropped, dropped=dropped, experts=engine.expert_memory
        )
        self._final: Stats | None = None
        limit = math.inf if options.time_limit_ms is None else options.time_limit_ms
        self._deadline = self._stats.start + limit / 1000

    def check(self) -> None:
        """Claim the context, if an answer can begin with it; see `Context.check_prompt`.

        Raises:
            OptionError: also if the session answers already, or a token is none of the model's.
        """
        self.check_free()
        self.context.checked("logit_bias", self._options.logit_bias)
        self.context.checked("stop_tokens", self._options.stop_tokens)
        forgets = self._options.when_full.forgets
        if not forgets or not self.tokens:
            self.context.check_prompt()
        self.context.shifts |= forgets
        self.claim()

    def stats(self) -> Stats:
        """Return timings and counts so far, or those of the ended answer."""
        return self._final or self._stats.result(
            self._engine,
            self._speculation,
            tokens=len(self._answer.sampled),
            seed=self._options.seed or 0,
        )

    # for the scheduler

    @property
    def tokens(self) -> SequenceOf[int]:
        """Tokens of the prompt, and sampled tokens."""
        return self.context.tokens

    @property
    def computed(self) -> int:
        """Number of tokens in the KV cache; never the last one, whose logits are wanted."""
        context = self.context
        return min(len(context.sequence.tokens), len(context.tokens) - 1)  # asked 8 times a step

    @property
    def findable(self) -> int:
        """Number of tokens that it would begin with, in its session or the KV cache."""
        return min(self.context.findable, self._reusable)

    @property
    def _reusable(self) -> int:
        """Number of tokens that need not be computed if they are in the KV cache."""
        scores = self._scores
        return len(self.tokens) if scores is None or scores.complete else scores.known

    @property
    def needed(self) -> list[int]:
        """KV blocks of each cache group that it lacks for all tokens and one more."""
        if self.job is None:
            return self.context.needed
        return self._engine.cache.needed(self.job.growth, len(self.tokens))

    @property
    def underway(self) -> Underway | None:
        """Rows of the prompt on their way; None: none, or the context has changed since."""
        job = self.job
        if job is None or not job.continues(self.context.sequence):
            return None
        return job.underway

    @property
    def decoding(self) -> bool:
        """Whether only the token that was sampled last has to be computed."""
        return bool(self._answer.sampled) and self.computed == len(self.tokens) - 1

    @property
    def salt(self) -> str:
        """See `Schedulable`; a prompt to be scored waits for no other one to compute its prefix."""
        if self._scores is not None and not self._scores.complete:
            return f"{self.context.salt} {id(self)}"
        return self.context.salt

    @property
    def holding(self) -> bool:
        """Whether it has blocks in the KV cache."""
        return len(self.context.sequence) > 0

    # for the loop

    def begin(self) -> None:
        """Take over the longest cached prefix, at the beginning and after a preemption.

        Raises:
            OptionError, ContextOverflowError: see `Context.check_prompt`.
            CacheFullError: there is no longer room for what was given back.
        """
        self.context.wake(self)
        self.context.take_back()
        self._make_room()
        self.context.check_prompt()
        self.context.begin()
        end = self.context.cache_end
        if self.context.cached > self._reusable:
            end = "scored"
            self.context.sequence.truncate(self._reusable)
        self._stats.begun(self.context.cached, end)

    def begin_at(self, other: Request) -> None:
        """Begin with the prompt of another request, of which nothing else is computed yet."""
        self.context.wake(self)
        self.context.become(other.context)
        self._stats.begun(self.context.cached, self.context.cache_end)

    def preempt(self) -> None:
        """Give the blocks back until the request is begun again."""
        self._stats.preempted += 1
        self._drop_job()
        self._speculation.close()
        self.context.give_back()

    def end(self) -> bool:
        """End the answer if no token may follow; returns whether it has ended.

        Raises:
            OptionError: see `check_unchanged`.
        """
        self.check_unchanged()
        reason = self._end_reason()
        if reason is not None:
            self._finish(reason)
        return reason is not None

    def stop_now(self) -> bool:
        """Whether the result of a step, or of the job, is no longer needed."""
        obsolete = self.job is not None and self.underway is None
        return obsolete or self.withdrawn or self._end_reason() in ("cancelled", "time")

    def draft_choice(self, company: int) -> Choice | None:
        """Choose a draft for a step that decodes `company` sequences and nothing else."""
        if not self.decoding:
            return None
        room, states = self._room(), self._engine.cache.draft_room(company)
        most = room if states is None else min(room, states)
        return self._speculation.choose(most, self.tokens, company=company)

    def span(
        self, rows: int, *, draft: int = 0, layers: Layers | None = None, apart: bool = False
    ) -> Span:
        """Return the next `rows` tokens, and a draft behind the token that was sampled last.

        Args:
            draft: number of tokens of the draft at most, as `draft_choice` has it or fewer.
            layers: layers that rows of a prompt go through; None: all.
            apart: whether they are computed beside the engine's thread, as `job`.

        Raises:
            CacheFullError: there is no room to shift a full context, or for a job.
        """
        self._make_room()
        # a step that failed may have computed the last token and lost its logits
        self.context.forget(self.context.cached - self.computed)
        if self._scores is not None and not self._scores.complete:
            # so may one that has lost the hidden states of its tokens
            self.context.forget(max(0, self.context.cached - self._scores.known))
        end = len(self.tokens)
        answer = end - len(self._answer.sampled)
        rows = self._whole_blocks(rows, answer)
        computed, kv_read = self.computed, self._engine.options.kv_read
        # rows of the answer that read a part of what they see come by themselves
        choosing = end if kv_read is None else max(answer, first_choosing(kv_read))
        if computed < choosing:
            rows = min(rows, choosing - computed)
        tokens = self.tokens[computed : computed + rows]
        last, candidates = computed + len(tokens) == end, self._candidates()
        adapter = None if self.context.adapter is None else self.context.adapter.weights
        plain = min(len(tokens), max(0, self.context.adapter_start - computed))
        if self.underway is None or layers is None:
            self._drop_job()
        if layers is not None or apart:
            self.job = self.job or PrefillJob(
                self.context.sequence,
                tokens,
                adapter=adapter,
                adapter_start=plain,
                shortlists=self._shortlists,
            )
            return self.job.span(
                layers, logit_rows=int(last), candidates=candidates, answers=computed >= answer
            )
        guess = self._speculation.draft(draft, self.tokens)
        return Span(
            self.context.sequence,
            [*tokens, *guess],
            int(last) + len(guess),
            candidates,
            all_states=self.wants_states,
            drafted=len(guess),
            answers=computed >= answer,
            shortlists=self._shortlists,
            adapter=adapter,
            adapter_start=plain,
        )

    def _whole_blocks(self, rows: int, end: int) -> int:
        """Return the rows of a prompt up to `end` that come next, so that blocks which read a part
        are whole."""
        if self._engine.options.prefill_mass is None or self.computed >= end:
            return rows
        if self.computed > DENSE_POSITIONS:
            # found in a block of another prompt, or given back with rows of one
            self.context.forget(self.context.cached - self.computed // BLOCK * BLOCK)
        until = self.computed + rows
        if DENSE_POSITIONS < until < end:
            until = max(until // BLOCK, self.computed // BLOCK + 1) * BLOCK
        return min(until, end) - self.computed

    @property
    def wants_states(self) -> bool:
        """Whether hidden states of rows without logits are used as well: they score a prompt."""
        return self._scores is not None and not self._scores.complete

    def take(self, rows: Rows, *, decoded: bool, company: int, seconds: float) -> None:
        """Take the results of a step for the request's span, and sample from its logits.

        Args:
            decoded: whether the span was the token sampled last, and its draft.
            company: number of sequences in the step, if it decoded and nothing else; else 0.
            seconds: seconds that the step took.
        """
        if self.job is not None:
            if not self.job.take(rows.hidden):
                return self._stats.rested(rows, seconds)
            self.context.take_over(self.job.growth.land())
            self.job = None
        self.computed_states(rows)
        if decoded:
            self._stats.decoded(seconds)
        else:
            self._stats.prefilled(rows, seconds)
            self._report(len(rows.hidden))
        logits = rows.logits
        if not logits:
            return
        if decoded:
            timed = seconds if company else None
            self._speculation.computed(logits[1:], seconds=timed, company=company)
        following: Logits | None = logits[0]
        while following is not None and not self.finished:
            self._sample(following)
            sampled = self._answer.sampled
            following = self._speculation.after(sampled[-1]) if sampled else None
            self._stats.steps += following is not None
        self.context.forget(self._speculation.settle())
        self.context.sequence.settle()
        self._speculation.computed_states(self.tokens, self.context.sequence, rows.hidden[:0])

    def computed_states(self, rows: Rows) -> None:
        """Use the hidden states of rows that have passed the last layer.

        They score a prompt, and tell what may follow.
        """
        self._speculation.computed_states(self.tokens, self.context.sequence, rows.hidden)
        scores = self._scores
        if scores is None or scores.complete:
            return
        start = self.context.cached - len(rows.hidden)
        scores.add(start, rows.hidden, should_stop=self.stop_now)
        if scores.complete:
            self.put(Piece("", prompt_logprobs=tuple(scores.tokens)))

    def leave(self) -> None:
        """Give back what is not needed when the loop has done with the request; unread tokens of a
        withdrawn answer are no part of its session."""
        self._drop_job()
        self._speculation.close()
        if self.withdrawn:
            self.cut()
        if self._closes:
            self.context.close_now()
        else:
            self.context.rest(self)

    def _drop_job(self) -> None:
        """Drop rows on their way, if any; they are computed again if the request goes on."""
        if self.job is not None:
            self.job.drop()
            self.job = None

    def _finish(self, reason: FinishReason) -> None:
        """End the answer with a last piece of the text that was held back."""
        self.put(Piece(self._answer.rest(), finish_reason=reason))

    def put(self, piece: Piece) -> None:
        """Add a piece, see `Stream.put`; the last one has the statistics."""
        if piece.finish_reason is not None:
            self._final = self.stats()
            piece = replace(piece, stats=self._final)
        super().put(piece)

    def _report(self, count: int) -> None:
        if count and (self._wants_reports or self._progress is not None):
            done = self._stats.computed
            total = max(len(self.tokens) - (self._stats.cached or 0), done)
            report = Progress("prefill", done, total, "tokens")
            if self._wants_reports:
                self.report = report
            if self._progress is not None:
                self._progress(report)

    def _make_room(self) -> None:
        """Forget tokens of a full context, if the options ask for it."""
        if len(self.tokens) > self._engine.ctx_size:
            rule, keep = self._options.when_full, self._options.keep
            self._stats.dropped += self.context.make_room(rule, keep)

    def _room(self) -> int:
        """Return the number of tokens that may come after the last one."""
        in_context = self._engine.ctx_size - len(self.tokens)
        limit = self._options.max_tokens
        return in_context if limit is None else min(in_context, limit - len(self._answer.sampled))

    def _candidates(self) -> int:
        """Return the number of best logits that suffice for the request and its forks; 0: all."""
        if self._scores is not None and not self._scores.complete:
            return 0  # where a back end gives the best alone, it gives no hidden states
        needed = [each._answer.best_needed for each in (self, *self.forks)]
        return max(needed) if all(needed) else 0

    def _end_reason(self) -> FinishReason | None:
        """Return why the answer is over before its next token; None if it is not."""
        if self._cancel is not None and self._cancel.is_set():
            return "cancelled"
        if time.perf_counter() >= self._deadline:
            return "time"
        return self._limit()

    def _limit(self) -> FinishReason | None:
        full = len(self.tokens) > self._engine.ctx_size and not self._options.when_full.forgets
        # a prompt is computed also where nothing is to be sampled
        none = self._options.max_tokens == 0 and self.context.cached == len(self.tokens)
        none = none and (self._scores is None or self._scores.complete)
        return "length" if full or none else self._answer.limit()

    def _sample(self, logits: Logits) -> None:
        """Draw a token and append its piece, and a last piece if no token may follow."""
        reason = self._end_reason()
        if reason is not None:
            return self._finish(reason)
        token = self._answer.draw(logits, self.tokens)
        if not self._answer.sampled:
            self._stats.first_token()
        self.extend(token)
        piece = self._answer.add(token, logits)
        self.put(piece)
        reason = None if piece.finish_reason else self._limit()
        if reason is not None:
            self._finish(reason)
