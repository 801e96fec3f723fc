"""From an ask to the events of its answers.

    Begun, PromptProgress..., Delta..., End for each sample

A dialect makes its JSON of them. Whoever closes the stream of events, or is cancelled while it
waits, withdraws the ask: its blocks are given back with the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from edgellm.asynchronous import driven
from edgellm.engine.infill_sampler import InfillSampler
from edgellm.infill import infill_options, infill_tokens
from edgellm.progress import Progress
from edgellm.results import FinishReason, Piece, Stats
from edgellm.samples import SamplePieces, sample_pieces
from edgellm.serve.ask import Ask, Conversation, Infill
from edgellm.serve.metrics import Metrics
from edgellm.serve.request_error import RequestError, request_error
from edgellm.text.fim_budget import budget
from edgellm.text.prompt import encode_conversation
from edgellm.text.template import Scalar
from edgellm.tool_use import ToolCallDelta

if TYPE_CHECKING:
    from edgellm.engine.engine import Engine
    from edgellm.engine.pending import Pending
    from edgellm.engine.request import LogitFilter
    from edgellm.generation_options import GenerationOptions
    from edgellm.llm import LLM
    from edgellm.serve.model_pool import ModelPool
    from edgellm.serve.options import ServeOptions


@dataclass(frozen=True)
class Client:
    """Who asks.

    Attributes:
        salt: of the names of its blocks in the KV cache: only asks with the same one find them.
    """

    salt: str = ""


@dataclass(frozen=True)
class Begun:
    """An ask was taken in; what is wrong with it was raised before.

    Attributes:
        model: the id of the model that answers.
        prompt: the tokens of the prompt.
        options: of the answers.
    """

    model: str
    prompt: tuple[int, ...]
    options: GenerationOptions
    engine: Engine


@dataclass(frozen=True)
class PromptProgress:
    """How far a prompt is: tokens of it that are computed, of those that were not cached."""

    done: int
    total: int


@dataclass(frozen=True)
class Delta:
    """What has come of an answer since its last one; several tokens that are there at once.

    Attributes:
        sample: which of the answers, from 0.
        text: to be shown; may be empty.
        pieces: its tokens, and what is known of each.
        reasoning: what the model thinks, which is not in `text`.
        calls: of tools, which are not either.
    """

    sample: int
    text: str
    pieces: tuple[Piece, ...]
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class End:
    """The end of an answer, behind its last `Delta`."""

    sample: int
    finish_reason: FinishReason
    stats: Stats


Event: TypeAlias = Begun | PromptProgress | Delta | End


class Answering:
    """Answers asks with the models of a pool, as many as its limits allow.

    Attributes:
        metrics: what it has done so far.
    """

    def __init__(self, pool: ModelPool, options: ServeOptions) -> None:
        self.pool = pool
        self.options = options
        self.metrics = Metrics()
        self._waiting_tokens = 0
        self._stop = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether answers are being ended."""
        return self._stop.is_set()

    def stop(self) -> None:
        """End all answers that are on their way with an error that says so."""
        self._stop.set()

    async def answer(self, ask: Ask, client: Client) -> AsyncGenerator[Event, None]:
        """The events of an ask, `Begun` first.

        Raises:
            RequestError: it cannot be answered, or not now, or the server is told to stop.
        """
        running = _Running(self, time.perf_counter())
        try:
            async with self.pool.use(ask.model) as llm:
                model = self.pool.resolve(ask.model)
                pending = self._pending(llm, model, ask, client, running.arrival)
                async with aclosing(_driven(llm.engine, pending)) as items:
                    async for item in items:
                        for event in running.events(item):
                            yield event
        except RequestError:
            raise
        except Exception as error:
            raise request_error(error) from error
        finally:
            running.leave()

    def _pending(
        self, llm: LLM, model: str, ask: Ask, client: Client, arrival: float
    ) -> Pending[_Item]:
        """What takes long about an ask, its prompt first; see `pending.py`."""
        engine = llm.engine
        tokens, options = _prompt(llm, model, ask)
        options = self._limited(options, arrival)
        if options.context_policy == "error" and len(tokens) > engine.ctx_size:
            raise too_long(len(tokens), engine.ctx_size)
        filters = _filters(llm, ask, options)
        yield Begun(model, tuple(tokens), options, engine)
        if ask.infill_sampler:  # which has cut by these already
            options = replace(options, top_p=1.0, min_p=0.0)
        yield from sample_pieces(
            engine, tokens, options, n=ask.n, cancel=self._stop, logit_filters=filters
        )

    def _limited(self, options: GenerationOptions, arrival: float) -> GenerationOptions:
        """The options within the server's limits; time counts from the arrival."""
        most, limit = self.options.max_tokens, self.options.time_limit_ms
        if most is not None:
            most = most if options.max_tokens is None else min(most, options.max_tokens)
            options = replace(options, max_tokens=most)
        if options.time_limit_ms is not None:
            limit = options.time_limit_ms if limit is None else min(limit, options.time_limit_ms)
        if limit is not None:
            waited_ms = int((time.perf_counter() - arrival) * 1000)
            options = replace(options, time_limit_ms=max(1, limit - waited_ms))
        return options

    def take_in(self) -> None:
        """Count an ask that waits.

        Raises:
            RequestError: too many do.
        """
        if self._stop.is_set():
            raise RequestError("unavailable", "the server is stopping", retry_after_s=1)
        if self.metrics.waiting >= self.options.max_waiting:
            raise self._refused("requests", f"{self.metrics.waiting} requests wait")
        self.metrics.waiting += 1

    def count_tokens(self, count: int) -> None:
        """Count the tokens of an ask that waits.

        Raises:
            RequestError: too many wait.
        """
        others = self._waiting_tokens
        if others and others + count > self.options.max_waiting_tokens:
            raise self._refused("tokens", f"{others} tokens of prompts wait")
        self._waiting_tokens += count

    def wait_no_more(self, tokens: int) -> None:
        """An ask of so many tokens has begun, or is over."""
        self.metrics.waiting -= 1
        self._waiting_tokens -= tokens

    def _refused(self, why: str, what: str) -> RequestError:
        self.metrics.rejected[why] += 1
        rate = self.metrics.prompt_tokens_per_second or 200
        retry_after_s = min(60.0, 1 + self._waiting_tokens / rate / 2)
        return RequestError(
            "overloaded",
            f"the server is busy: {what}; try again in {retry_after_s:.0f} seconds",
            retry_after_s=retry_after_s,
        )


_Item: TypeAlias = Begun | Progress | SamplePieces


def _driven(engine: Engine, pending: Pending[_Item]) -> AsyncGenerator[_Item, None]:
    return driven(engine, pending)


class _Running:
    """An ask on its way: what is counted of it, and its events."""

    def __init__(self, answering: Answering, arrival: float) -> None:
        self.arrival = arrival
        self._answering = answering
        self._metrics = answering.metrics
        self._tokens = 0
        self._waits = self._runs = False
        self._last = arrival
        answering.take_in()
        self._waits = True

    def events(self, item: _Item) -> list[Event]:
        """What an item of the loop says."""
        if isinstance(item, Begun):
            self._answering.count_tokens(len(item.prompt))
            self._tokens = len(item.prompt)
            return [item]
        if isinstance(item, Progress):
            return [PromptProgress(item.done, item.total)]
        self._begin()
        pieces = item.pieces
        events: list[Event] = []
        text = "".join(piece.text for piece in pieces)
        if text or any(piece.token is not None for piece in pieces):
            events.append(Delta(item.sample, text, pieces))
        last = pieces[-1]
        if last.finish_reason is not None and last.stats is not None:
            events.append(self._end(item.sample, last.finish_reason, last.stats))
        return events

    def leave(self) -> None:
        """It is over, or its client has gone."""
        if self._waits:
            self._answering.wait_no_more(self._tokens)
        if self._runs:
            self._metrics.running -= 1
        self._waits = self._runs = False

    def _begin(self) -> None:
        now = time.perf_counter()
        if self._waits:
            self._answering.wait_no_more(self._tokens)
            self._waits, self._runs = False, True
            self._metrics.running += 1
        else:
            self._metrics.between_tokens.add(now - self._last)
        self._last = now

    def _end(self, sample: int, reason: FinishReason, stats: Stats) -> End:
        if reason == "cancelled":
            raise RequestError("unavailable", "the server is stopping", retry_after_s=1)
        seconds = time.perf_counter() - self.arrival
        self._metrics.answered(stats, reason, seconds=seconds, first=sample == 0)
        return End(sample, reason, stats)


def _hints(engine: Engine, prompt: Conversation) -> dict[str, Scalar]:
    """Those that the template reads."""
    known = engine.template.arguments if engine.template is not None else frozenset()
    return {name: value for name, value in prompt.template_hints.items() if name in known}


def conversation_tokens(engine: Engine, prompt: Conversation) -> list[int]:
    """A conversation as the model reads it."""
    return encode_conversation(
        prompt.messages,
        engine.template,
        engine.tokenizer,
        tools=() if prompt.tool_choice == "none" else prompt.tools,
        template_arguments={**_hints(engine, prompt), **prompt.template_arguments},
    )


def too_long(tokens: int, ctx_size: int) -> RequestError:
    return RequestError(
        "context_length",
        f"the prompt has {tokens} tokens, but the context holds {ctx_size}; shorten it",
        code="context_length_exceeded",
        details={"n_prompt_tokens": tokens, "n_ctx": ctx_size},
    )


def _filters(llm: LLM, ask: Ask, options: GenerationOptions) -> list[LogitFilter] | None:
    """What the answers may consist of, one for each."""
    if ask.json_schema is not None:
        return [llm.json_filter(ask.json_schema)] * ask.n
    if ask.infill_sampler:
        return [InfillSampler(llm.engine.tokenizer, options)] * ask.n
    return None


def _prompt(llm: LLM, model: str, ask: Ask) -> tuple[list[int], GenerationOptions]:
    """The tokens of a prompt, and how it is answered."""
    engine, prompt = llm.engine, ask.prompt
    options = llm.generation_options(**ask.arguments)
    if isinstance(prompt, Infill):
        fitted = budget(engine.ctx_size, max_tokens=options.max_tokens)
        tokens = infill_tokens(
            engine.tokenizer,
            prompt.gap,
            model=model,
            order=prompt.order,
            budget=fitted if prompt.fitted else None,
        )
        return tokens, infill_options(engine, options)
    if isinstance(prompt, Conversation):
        return conversation_tokens(engine, prompt), options
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt, parse_special=True), options
    largest = max(prompt, default=0)
    if largest >= engine.config.vocab_size:
        raise RequestError(
            "invalid_request",
            f"token {largest} is not in the vocabulary; allowed are whole numbers from 0 to "
            f"{engine.config.vocab_size - 1}",
            param="prompt",
        )
    return list(prompt), options
