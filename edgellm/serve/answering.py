"""Answers to asks: from an `Ask` to the stream of events that a dialect turns into JSON.

A caller that closes the stream, or is cancelled while it waits, withdraws the ask. Its KV blocks
are given back with the next step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from edgellm.engine.call import Call
from edgellm.engine.embedding import chosen_method, embeddings, similarities, yes_no, yes_no_prompts
from edgellm.engine.loop import aiterate
from edgellm.engine.samples import SamplePieces, sample_pieces
from edgellm.generation_options import GenerationOptions
from edgellm.progress import Progress
from edgellm.serve.ask import (
    Ask,
    EmbeddingAsk,
    EncodedPrompt,
    RerankAsk,
    answerable_prompt,
    check_size,
    embedding_prompt,
)
from edgellm.serve.events import (
    Begun,
    Client,
    Delta,
    Embeddings,
    End,
    Event,
    PromptProgress,
    Relevances,
)
from edgellm.serve.kept_ends import KeptEnds
from edgellm.serve.metrics import Metrics
from edgellm.serve.queue_limits import Counted, QueueLimits, TextWork
from edgellm.serve.request_error import RequestError, request_error, stopping

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgellm.engine.chat_prompt import AnswerReader
    from edgellm.engine.engine import Engine
    from edgellm.engine.loop import Pending
    from edgellm.llm import LLM
    from edgellm.serve.model_pool import ModelPool
    from edgellm.serve.options import ServeOptions

T = TypeVar("T")
_Item: TypeAlias = Begun | Progress | SamplePieces
# Fetches KV blocks of a prompt that other processes have computed, where that is worth it.
# Arguments: engine, tokens of the prompt, salt of its blocks. Raises nothing: blocks that do not
# arrive are computed here.
BringPrefix: TypeAlias = "Callable[[Engine, Sequence[int], str], Awaitable[None]]"


class Answering:
    """Service that answers asks with the models of a pool, within the limits of the queue.

    Args:
        bring_prefix: called before a prompt is computed; None: no other process computes prompts.

    Attributes:
        metrics: counters of all asks so far.
        text_work: threads for requests that need no answer of a model, such as counting tokens.
    """

    def __init__(
        self, pool: ModelPool, options: ServeOptions, *, bring_prefix: BringPrefix | None = None
    ) -> None:
        self.pool = pool
        self.options = options
        self._bring_prefix = bring_prefix
        self.metrics = Metrics()
        self.text_work = TextWork(self.metrics)
        self._limits = QueueLimits(options, self.metrics)
        self._stop = threading.Event()
        self._ends = KeptEnds()

    @property
    def stopping(self) -> bool:
        """Whether the server is stopping, and so ends its answers."""
        return self._stop.is_set()

    @property
    def on_their_way(self) -> int:
        """Number of asks that wait or are being answered."""
        return self.metrics.waiting + self.metrics.running

    def stop(self) -> None:
        """End all unfinished answers with an error that says that the server stops."""
        self._stop.set()
        self.text_work.close()

    async def check(self, asks: Sequence[Ask]) -> None:
        """Refuse the asks of one request, all for one model, if one of them cannot be answered.

        Raises:
            RequestError, EdgeLLMError: see `answerable_prompt`; also if the model cannot be loaded
                or too many texts wait.
        """
        model = self.pool.resolve(asks[0].model)
        for ask in asks:
            self.pool.adapters.name_of(ask, model)  # refuses what is not there
        async with self.pool.use(model) as llm:
            await self.text_work.call(lambda: [answerable_prompt(llm, model, ask) for ask in asks])

    async def answer(self, ask: Ask, client: Client) -> AsyncGenerator[Event, None]:
        """Answer an ask, and yield its events, `Begun` first.

        Raises:
            RequestError: the ask cannot be answered, or not now, or the server is stopping.
        """
        limit_ms = self._time_limit_ms(ask.arguments.get("time_limit_ms"))
        with self._taken_in(client) as counted:
            async with self._model(ask.model, limit_ms) as llm:
                model = self.pool.resolve(ask.model)
                adapter = self.pool.adapters.name_of(ask, model)
                if adapter is not None or ask.lora is not None:  # also one that asks for none
                    model = adapter or model
                    ask = replace(ask, arguments={**ask.arguments, "adapter": adapter})
                pending = self._pending(llm, model, ask, client, counted.arrival)
                async with aclosing(_items(llm, pending)) as items:
                    async for item in items:
                        for event in _events(item, counted):
                            yield event
                        # other processes compute prompts without adapters
                        if isinstance(item, Begun) and self._bring_prefix and adapter is None:
                            await self._bring_prefix(llm.engine, item.prompt, client.salt)

    @asynccontextmanager
    async def _model(self, name: str | None, limit_ms: int | None) -> AsyncIterator[LLM]:
        """Yield a model, which has to be loaded within a time limit.

        Raises:
            RequestError: see `ModelPool.use`; or the time limit has passed.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
                    llm = await stack.enter_async_context(self.pool.use(name))
            except TimeoutError:
                raise RequestError(
                    "unavailable",
                    f"the model was not loaded within {limit_ms} ms; try again later",
                    retry_after_s=1,
                ) from None
            yield llm

    async def embed(self, ask: EmbeddingAsk, client: Client) -> Embeddings:
        """Return the embeddings of texts or token ids.

        Raises:
            RequestError: as with `answer`, or the time limit has passed.
        """
        pending = partial(self._embedding, ask=ask, client=client)
        counts, vectors = await self._results(ask, client, pending)
        return Embeddings(self._named(ask), vectors, counts)

    async def rerank(self, ask: RerankAsk, client: Client) -> Relevances:
        """Return the relevance of documents to a query.

        Raises:
            RequestError: as with `answer`, or the time limit has passed.
        """
        pending = partial(self._relevance, ask=ask, client=client)
        counts, values = await self._results(ask, client, pending)
        return Relevances(self._named(ask), values, sum(counts))

    def _adapter(self, ask: EmbeddingAsk | RerankAsk) -> str | None:
        return self.pool.adapters.name_of(ask, self.pool.resolve(ask.model))

    def _named(self, ask: EmbeddingAsk | RerankAsk) -> str:
        """Return the id of the model, or the name of the adapter, that an ask is for."""
        return self._adapter(ask) or self.pool.resolve(ask.model)

    async def _results(
        self,
        ask: EmbeddingAsk | RerankAsk,
        client: Client,
        pending: Callable[[LLM], Pending[list[int] | T]],
    ) -> tuple[list[int], list[T]]:
        """Return the token counts of the prompts of an ask, and the result of each.

        Args:
            pending: yields the token count of each result in one list, then the results in order.
        """
        limit_ms = self._time_limit_ms(ask.time_limit_ms)
        with self._taken_in(client) as counted:
            try:
                async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
                    return await self._collected(ask, counted, pending)
            except TimeoutError:
                raise RequestError(
                    "unavailable",
                    f"the results were not there within {limit_ms} ms; send fewer texts, or "
                    "try again when less is asked of the server",
                    retry_after_s=1,
                ) from None

    async def _collected(
        self,
        ask: EmbeddingAsk | RerankAsk,
        counted: Counted,
        pending: Callable[[LLM], Pending[list[int] | T]],
    ) -> tuple[list[int], list[T]]:
        results: list[T] = []
        counts: list[int] = []
        async with (
            self.pool.use(ask.model) as llm,
            aclosing(_counts_and_results(llm, pending(llm))) as items,
        ):
            async for item in items:
                if isinstance(item, list):
                    counts = item
                    counted.take_tokens(sum(counts))
                else:
                    counted.computed(counts[len(results)])
                    results.append(item)
        if len(results) < len(counts):
            raise stopping()
        return counts, results

    @contextmanager
    def _taken_in(self, client: Client) -> Iterator[Counted]:
        """Count an ask in the queue limits while the context is open.

        Every exception of the ask becomes a `RequestError` for its client.

        Raises:
            RequestError: too many asks wait, or the server is stopping.
        """
        if self._stop.is_set():
            raise stopping()
        counted = self._limits.take_in(client.owner)
        try:
            yield counted
        except RequestError:
            raise
        except Exception as error:
            raise request_error(error) from error
        finally:
            counted.leave()

    def _pending(
        self, llm: LLM, model: str, ask: Ask, client: Client, arrival: float
    ) -> Pending[_Item]:
        """Encode the prompt of an ask, yield `Begun`, then the progress and pieces of its answers.

        The parts of this work that take long run outside the event loop (see `aiterate`).
        """
        engine = llm.engine
        prompt = answerable_prompt(llm, model, ask)
        tokens, options = prompt.tokens, self._limited(prompt.options, arrival)
        yield Begun(model, tuple(tokens), options, engine)
        call = self._answer_call(prompt, ask, client, arrival)  # time has passed since `Begun`
        begun = yield from self._ends.begun(
            engine, tokens, call, model=model, ask=ask, client=client
        )
        if begun is not None:
            call = self._answer_call(prompt, ask, client, arrival)
        pending = sample_pieces(
            engine,
            tokens,
            call,
            n=ask.n,
            salt=client.salt,
            shown_special=() if prompt.chat is None else prompt.chat.shown_special,
            begun=begun,
        )
        if prompt.chat is None:
            yield from pending
        else:
            yield from _read(pending, [prompt.chat.reader() for _ in range(ask.n)])

    def _answer_call(self, prompt: EncodedPrompt, ask: Ask, client: Client, arrival: float) -> Call:
        options = replace(self._limited(prompt.options, arrival), owner=client.owner)
        if ask.infill_sampler:  # the sampler has applied these two already
            options = replace(options, top_p=1.0, min_p=0.0)
        return Call(options=options, cancel=self._stop, logit_filter=prompt.logit_filter)

    def _embedding(
        self, llm: LLM, *, ask: EmbeddingAsk, client: Client
    ) -> Pending[list[int] | NDArray[np.float32]]:
        """Yield the token count of each prompt in one list, then the vectors in order."""
        engine, pooling = llm.engine, self.options.pooling
        tokens = [
            embedding_prompt(engine, prompt, pooling=pooling, truncates=ask.truncates)
            for prompt in ask.prompts
        ]
        yield [len(ids) for ids in tokens]
        call = self._call(ask, client)
        yield from embeddings(engine, tokens, pooling=pooling, call=call, salt=client.salt)

    def _call(self, ask: EmbeddingAsk | RerankAsk, client: Client) -> Call:
        options = GenerationOptions(owner=client.owner, adapter=self._adapter(ask))
        return Call(options=options, cancel=self._stop)

    def _relevance(self, llm: LLM, *, ask: RerankAsk, client: Client) -> Pending[list[int] | float]:
        """Yield the token count of each document in one list, then the relevances in order."""
        engine, pooling = llm.engine, self.options.pooling
        call, salt = self._call(ask, client), client.salt
        if chosen_method(engine, ask.method) == "yes_no":
            check_size(engine, max(map(len, ask.documents)) + len(ask.query))
            prompts = yes_no_prompts(engine, ask.query, ask.documents, instruction=ask.instruction)
            counts = [len(prompt) for prompt in prompts]
            pending = yes_no(engine, prompts, call=call, salt=salt)
        else:
            prompts = [
                embedding_prompt(engine, text, pooling=pooling, truncates=False)
                for text in (ask.query, *ask.documents)
            ]
            query, first, *rest = (len(prompt) for prompt in prompts)
            counts = [query + first, *rest]
            pending = similarities(engine, prompts, pooling=pooling, call=call, salt=salt)
        yield counts
        yield from pending

    def _limited(self, options: GenerationOptions, arrival: float) -> GenerationOptions:
        """Cut the options of an answer to the server's limits.

        The time limit counts from `arrival`, a time of `time.perf_counter`.
        """
        most, limit = self.options.max_tokens, self._time_limit_ms(options.time_limit_ms)
        if most is not None:
            most = most if options.max_tokens is None else min(most, options.max_tokens)
            options = replace(options, max_tokens=most)
        if limit is not None:
            waited_ms = int((time.perf_counter() - arrival) * 1000)
            options = replace(options, time_limit_ms=max(1, limit - waited_ms))
        return options

    def _time_limit_ms(self, asked: int | None) -> int | None:
        """Return the shorter of the asked and the server's time limit in ms; None: no limit."""
        limits = [ms for ms in (asked, self.options.time_limit_ms) if ms is not None]
        return min(limits, default=None)


def _read(
    pending: Pending[Progress | SamplePieces], readers: Sequence[AnswerReader]
) -> Pending[Progress | SamplePieces]:
    """Split each answer's pieces into text, reasoning and tool calls, with its own reader."""
    with closing(pending):
        for item in pending:
            if isinstance(item, SamplePieces):
                pieces = tuple(map(readers[item.sample].read, item.pieces))
                item = SamplePieces(item.sample, pieces)
            yield item


def _events(item: _Item, counted: Counted) -> list[Event]:
    """Convert an item of the loop to events, and count it.

    Raises:
        RequestError: too many tokens wait, or the server is stopping.
    """
    if isinstance(item, Begun):
        counted.take_tokens(len(item.prompt))
        return [item]
    if isinstance(item, Progress):
        return [PromptProgress(item.done, item.total)]
    counted.progressed()
    events: list[Event] = [*deltas(item)]
    last = item.pieces[-1]
    if last.finish_reason == "cancelled":
        raise stopping()
    if last.finish_reason is not None and last.stats is not None:
        counted.answered(last.stats, last.finish_reason, sample=item.sample)
        events.append(End(item.sample, last.finish_reason, last.stats))
    return events


def deltas(item: SamplePieces) -> list[Delta]:
    """Merge the pieces of one answer into deltas.

    A delta's reasoning comes before its text, and its text before its tool calls. A piece in
    another order begins a new delta.
    """
    parts = [Delta(item.sample, "", ())]
    for piece in item.pieces:
        calls, last = piece.tool_calls, parts[-1]
        if piece.text or piece.reasoning:
            # the rest of a call that has begun stands before the text of the same token
            begun = tuple(takewhile(lambda call: call.name is None, calls))
            calls = calls[len(begun) :]
            if last.calls or begun or (piece.reasoning and last.text):
                parts[-1] = replace(last, calls=last.calls + begun)
                parts.append(last := Delta(item.sample, "", ()))
        parts[-1] = Delta(
            item.sample,
            last.text + piece.text,
            (*last.pieces, piece),
            last.reasoning + piece.reasoning,
            last.calls + calls,
        )
    return [delta for delta in parts if _says(delta)]


def _says(delta: Delta) -> bool:
    shown = delta.text or delta.reasoning or delta.calls
    return bool(shown) or any(
        piece.token is not None or piece.prompt_logprobs for piece in delta.pieces
    )


# `aiterate` with the item types of the two kinds of generators


def _items(llm: LLM, pending: Pending[_Item]) -> AsyncGenerator[_Item, None]:
    return aiterate(llm.engine.loop, pending)


def _counts_and_results(
    llm: LLM, pending: Pending[list[int] | T]
) -> AsyncGenerator[list[int] | T, None]:
    return aiterate(llm.engine.loop, pending)
