"""A session: tokens, and their place in the KV cache."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Collection, Generator, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from edgellm.checks import check_number, check_path
from edgellm.engine.call import Call, CallArguments, model_call
from edgellm.engine.condense import condense
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import Pending, Wait, aiterate, arun, iterate, pieces, run
from edgellm.engine.request import Request
from edgellm.engine.turned import check_turnable, common_end, keep_end
from edgellm.errors import OptionError
from edgellm.results import Completion, Composition, Condensed, Piece, Stats, completion


class Session:
    """A growing sequence of tokens with its place in the KV cache.

    Sessions of one model share its KV cache: a prefix that any session computed is not computed
    again. A session is not to be used from two threads at once; different sessions may be.

    `close` gives its place in the cache back, as do `with` and, later, the garbage collector.

    Attributes:
        stats: timings and counts of the last answer; None before one.
        composed: what `LLM.compose` or `replace` copied and computed last; None: neither did.
    """

    def __init__(
        self,
        engine: Engine,
        context: Context | None = None,
        *,
        closes: bool = False,
        adapter: str | None = None,
    ) -> None:
        """Begin with a context.

        Args:
            context: tokens and KV cache to begin with; None: an empty context.
            closes: whether the session closes at the end of its first answer.
            adapter: adapter of answers that name none, whatever the model's options say; None: the
                model as it is.

        Raises:
            OptionError: no adapter has this name.
        """
        self._engine = engine
        self._adapter = adapter
        if context is None:
            context = Context(engine, adapter=engine.adapters.get(adapter))
        self._context = context
        self._closes = closes
        self.stats: Stats | None = None
        self.composed: Composition | None = None
        self._source: Context | None = None  # earlier tokens, of which `replace` keeps the end

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens appended and generated; of a stream, the tokens that were read."""
        return tuple(self._context.read()[0])

    @property
    def cached(self) -> int:
        """Number of the session's tokens that are in the KV cache."""
        return self._context.read()[1]

    def __repr__(self) -> str:
        tokens, cached = self._context.read()
        name = self._engine.bundle.manifest.name
        return f"<edgellm.Session with {name}: {len(tokens)} tokens, {cached} of them cached>"

    def append(self, text: str | SequenceOf[int], *, parse_special: bool = False) -> None:
        """Add text or token ids; the tokens are computed when the next answer needs them.

        Raises:
            OptionError: a token id that is not in the vocabulary.
        """
        self._context.append("text", text, parse_special=parse_special)

    def replace(self, tokens: SequenceOf[int], *, recompute: float = 1) -> None:
        """Become another sequence of tokens, keeping the prefix that both have in common.

        Tokens behind a gap, where a full context has forgotten tokens, are not kept: their K and V
        still depend on the forgotten tokens. With `recompute` below 1 they are, and so is the end
        that both have in common, as after a change in the middle of a text: `composed` counts.

        Args:
            recompute: share of the common end that is computed again, from its beginning; K and V
                of the others are copied to their new places, and still depend on what has changed.
                Answers are near those without copies, and no other prompt begins with these. They
                keep their part of the KV cache until the session is closed, and where there is no
                room for the old and the new end, or a change before an earlier one has less than
                half of the end left, all is computed again.

        Raises:
            OptionError: a token id that is not in the vocabulary.
            UnsupportedModelError: K and V of the model cannot stand at other positions.
        """
        check_number("recompute", recompute, 0, 1)
        if recompute == 1:
            self.composed = None
            return self._context.replace(tokens)
        adapter = self._context.adapter
        call = self._unlimited_call(adapter=None if adapter is None else adapter.name)
        return self._replace(self._context.checked("tokens", tokens), call, recompute=recompute)

    def _replace(self, new: list[int], call: Call, *, recompute: float) -> None:
        """Become other tokens as `replace` does, with the callbacks and the limit of a call."""
        context, copied = self._context, 0
        check_turnable(self._engine, self._engine.adapters.get(call.options.adapter))
        tokens, cached = context.read()
        exact = context.sequence.shareable is None and cached + 1 >= len(tokens)
        if self._source is None or exact:
            before, self._source = self._source, context.fork()
            if before is not None:
                before.close()
        if 2 * common_end(self._source.tokens, new) < common_end(tokens, new):
            context.replace(new)  # a change before an earlier one, which the source does not have
        else:
            source = self._source
            copied = run(
                self._engine.loop,
                keep_end(self._engine, context, new, source=source, call=call, recompute=recompute),
            )
        self.composed = Composition(
            copied_tokens=copied, computed_tokens=len(new) - copied, alone_tokens=0
        )

    def condense(self, keep: float = 0.5) -> Condensed:
        """Keep the rows of K and V that it takes to repeat the context; the tokens all stay.

        For a context that is asked about more than once. The model computes it, and then once more
        to see which rows each KV head of a layer attends to; the others are dropped, in the whole
        blocks of 128 tokens that there are now. So the session takes less of the KV cache, and its
        answers less time; they are near those without. What is appended later is kept whole, a
        rewind into what was condensed computes the context again, and no other prompt begins with
        any of it. Forks and files of the session are condensed as well (KVzip, arXiv:2505.23416).

        Args:
            keep: share of the rows that is kept, of all heads together. Each has 128 rows at
                least, so a short context keeps more.

        Returns:
            What was dropped.

        Raises:
            OptionError: the session is shorter than 257 tokens, condensed already or changed by
                another thread, or the model's back ends or options read no condensed context.
            UnsupportedModelError: no layer of the model can have a condensed context.
            ContextOverflowError: the context has no room to repeat 128 tokens.
            CacheFullError: other answers hold the KV cache.
        """
        return run(self._engine.loop, self._condensed(keep))

    async def acondense(self, keep: float = 0.5) -> Condensed:
        """Drop rows of K and V as `condense` does, for asyncio; see `astream`."""
        return await arun(self._engine.loop, self._condensed(keep))

    def _condensed(self, keep: float) -> Generator[Wait, None, Condensed]:
        check_number("keep", keep, 0, 1)
        call = self._unlimited_call()
        condensed = yield from condense(self._engine, self._context, keep=keep, call=call)
        if self._source is not None:
            self._source.close()
            self._source = None
        return condensed

    def fork(self) -> Session:
        """Return another session with the same tokens; no block is copied before one grows."""
        other = Session(self._engine, self._context.fork(), adapter=self._adapter)
        other._source = None if self._source is None else self._source.fork()
        return other

    def rewind(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        tokens, _ = self._context.read()
        check_number("length", length, 0, len(tokens), whole=True)
        self._context.set(tokens[:length])

    def save(self, path: str | Path) -> None:
        """Write tokens and KV cache to a file; `LLM.load_session` reads it.

        Raises:
            OptionError: the file cannot be written.
        """
        self._context.save(check_path("path", path))

    def close(self) -> None:
        """Give the memory back; other sessions find the prefix until its memory is needed."""
        self._context.close()
        if self._source is not None:
            self._source.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, **arguments: Unpack[CallArguments]) -> Completion:
        """Return the whole answer at once; see `stream`.

        An answer that was stopped is returned as far as it got: `finish_reason` is "cancelled" or
        "time". An answer that was stopped in prefill, or with a `max_tokens` of 0 ("length"), is
        empty.
        """
        pending = self._pending(replace(self._call(arguments), whole=True))
        return completion(list(iterate(self._engine.loop, pending)))

    def stream(self, **arguments: Unpack[CallArguments]) -> Iterator[Piece]:
        """Stream the answer piece by piece; the last piece has a finish_reason and the stats.

        Tokens that were not read before a stream is closed are no part of the session.

        Args:
            arguments: see `CallArguments`.

        Raises:
            OptionError: the session is empty, or an option is not allowed.
            ContextOverflowError: the tokens do not fit into the context.
            CacheFullError: answers on their way hold the whole cache.
        """
        pending = self._pending(self._call(arguments))
        return iterate(self._engine.loop, pending)

    async def agenerate(self, **arguments: Unpack[CallArguments]) -> Completion:
        """Return the answer of `generate`, for asyncio; see `astream`."""
        pending = self._pending(replace(self._call(arguments), whole=True))
        return completion([piece async for piece in aiterate(self._engine.loop, pending)])

    def astream(self, **arguments: Unpack[CallArguments]) -> AsyncGenerator[Piece, None]:
        """Stream the answer as `stream` does, for asyncio: `async for piece in session.astream()`.

        A task that is cancelled, and a loop that is left, withdraw the answer, as `cancel` would.
        """
        pending = self._pending(self._call(arguments))
        return aiterate(self._engine.loop, pending)

    def _call(self, arguments: CallArguments) -> Call:
        call, given = model_call(self._engine, arguments), arguments.get("options")
        if "adapter" in arguments or (given is not None and given.adapter is not None):
            return call
        return replace(call, options=replace(call.options, adapter=self._adapter))

    def _unlimited_call(self, **arguments: Unpack[CallArguments]) -> Call:
        call = self._call(arguments)
        return replace(call, options=replace(call.options, time_limit_ms=None))

    def _pending(self, call: Call, *, shown_special: Collection[int] = ()) -> Pending[Piece]:
        options = call.options
        if options.seed is None:
            call = replace(call, options=replace(options, seed=secrets.randbits(32)))
        self._context.catch_up()
        request = Request(self._context, call, closes=self._closes, shown_special=shown_special)
        try:
            yield from pieces(self._engine.loop, request)
        finally:
            self.stats = request.stats()
            self._context.settle()


def check_session(session: object, engine: Engine) -> Session:
    """Return a session; what is none of the model is refused."""
    if not isinstance(session, Session):
        raise OptionError(f"`session` is {session!r:.60}; an edgellm.Session is expected")
    if session._engine is not engine:
        raise OptionError("`session` is of another model; one of this `LLM` is expected")
    return session
