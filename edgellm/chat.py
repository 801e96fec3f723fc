"""A conversation over one session.

With the context policy `shift` whole turns are forgotten, the oldest first and the system prompt
never: when less than a quarter of the context is left, until half of it is.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

from edgellm.asynchronous import driven
from edgellm.checks import check_text
from edgellm.engine.engine import Engine
from edgellm.engine.pending import Pending
from edgellm.engine.request import LogitFilter
from edgellm.errors import OptionError
from edgellm.generation_options import (
    ContextPolicy,
    GenerationArguments,
    GenerationOptions,
    changed_options,
)
from edgellm.progress import ProgressCallback
from edgellm.results import Completion, Piece, Stats, completion
from edgellm.session import Session
from edgellm.text.prompt import Message, encode_conversation


class Chat:
    """Messages that take turns; earlier turns stay in the KV cache.

    `close` gives their place in the cache back, as do `with` and, later, the garbage collector.

    Attributes:
        messages: the conversation so far; may be changed between turns.
        options: how answers are sampled; may be changed between turns.
    """

    def __init__(
        self, engine: Engine, options: GenerationOptions, *, system: str | None = None
    ) -> None:
        self._engine = engine
        self._session = Session(engine)
        self._forgotten: list[Message] = []  # behind the system prompt; the model sees them no more
        self._dropped = 0  # tokens of them, with the last answer
        self._turn = threading.Lock()  # of an answer that is on its way
        self.options = options
        self.messages: list[Message] = []
        if system is not None:
            check_text("system", system)
            self.messages.append(Message("system", system))

    @property
    def stats(self) -> Stats | None:
        """Timings and counts of the last answer."""
        stats = self._session.stats
        return None if stats is None else self._counted(stats)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The conversation as the model saw it."""
        return self._session.tokens

    def send(
        self,
        text: str,
        *,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Completion:
        """Say something and get the whole answer; see `stream`.

        An answer that was stopped is one as well, see `Session.generate`; one that ended before its
        first token is empty, and the conversation is as it was.
        """
        pieces = self.stream(
            text,
            options=options,
            cancel=cancel,
            progress=progress,
            logit_filter=logit_filter,
            **arguments,
        )
        return completion(list(pieces))

    def stream(
        self,
        text: str,
        *,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Piece]:
        """Say something and get the answer piece by piece.

        An answer that is cancelled stays in the conversation as far as it got. If anything fails
        before the answer begins, the conversation is as it was.

        Args:
            options: of this answer, in the place of the chat's.
            cancel, progress, logit_filter: see `Session.stream`.
            arguments: fields of `GenerationOptions` for this answer, over those of `options`.
        """
        pending = self._say(text, options, cancel, progress, logit_filter, arguments)
        return self._engine.loop.drive(pending)

    async def asend(
        self,
        text: str,
        *,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Completion:
        """`send` for asyncio; see `astream`."""
        pending = self._say(text, options, cancel, progress, logit_filter, arguments)
        return completion([piece async for piece in driven(self._engine, pending)])

    def astream(
        self,
        text: str,
        *,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio; see `Session.astream`."""
        pending = self._say(text, options, cancel, progress, logit_filter, arguments)
        return driven(self._engine, pending)

    def regenerate(
        self,
        *,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Piece]:
        """Answer the last message once more, differently if the seed is open; see `stream`."""
        pending = self._say_again(options, cancel, progress, logit_filter, arguments)
        return self._engine.loop.drive(pending)

    def aregenerate(
        self,
        *,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> AsyncGenerator[Piece, None]:
        """`regenerate` for asyncio; see `Session.astream`."""
        pending = self._say_again(options, cancel, progress, logit_filter, arguments)
        return driven(self._engine, pending)

    def close(self) -> None:
        """Give the memory back; the messages stay."""
        self._session.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(
        self,
        text: str,
        options: GenerationOptions | None,
        cancel: threading.Event | None,
        progress: ProgressCallback | None,
        logit_filter: LogitFilter | None,
        arguments: GenerationArguments,
    ) -> Pending[Piece]:
        chosen = changed_options(self.options if options is None else options, arguments)
        check_text("text", text)
        if not text.strip():
            raise OptionError("the message is empty")
        with self._taking_turns():
            self.messages.append(Message("user", text))
            try:
                yield from self._answer(chosen, cancel, progress, logit_filter)
            finally:
                if self.messages[-1].role == "user":
                    self.messages.pop()

    def _say_again(
        self,
        options: GenerationOptions | None,
        cancel: threading.Event | None,
        progress: ProgressCallback | None,
        logit_filter: LogitFilter | None,
        arguments: GenerationArguments,
    ) -> Pending[Piece]:
        chosen = changed_options(self.options if options is None else options, arguments)
        with self._taking_turns():
            if [message.role for message in self.messages[-2:]] != ["user", "assistant"]:
                raise OptionError("there is no answer to generate again")
            previous = self.messages.pop()
            try:
                yield from self._answer(chosen, cancel, progress, logit_filter)
            finally:
                if self.messages[-1].role != "assistant":
                    self.messages.append(previous)

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """One answer at a time."""
        if not self._turn.acquire(blocking=False):
            raise OptionError(
                "the chat is already answering; take that answer to its end or close its stream, "
                "or open another chat"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _answer(
        self,
        options: GenerationOptions,
        cancel: threading.Event | None,
        progress: ProgressCallback | None,
        logit_filter: LogitFilter | None,
    ) -> Pending[Piece]:
        self._session.replace(self._prompt(options.context_policy))
        pieces: list[Piece] = []
        try:
            for item in self._session._pending(options, cancel, progress, logit_filter, {}):
                if isinstance(item, Piece):
                    if item.stats is not None:
                        item = replace(item, stats=self._counted(item.stats))
                    pieces.append(item)
                yield item
        finally:
            self._keep(pieces)

    def _prompt(self, context_policy: ContextPolicy) -> list[int]:
        """What the model sees of the conversation."""
        engine = self._engine
        first = int(self.messages[0].role == "system")
        turns = [i for i, m in enumerate(self.messages) if m.role == "user" and i > first]

        def tokens() -> list[int]:
            shown = self.messages[:first] + self.messages[first + len(self._forgotten) :]
            return encode_conversation(shown, engine.template, engine.tokenizer)

        begin = self.messages[first : first + len(self._forgotten)]
        if context_policy == "error" or begin != self._forgotten:
            self._forgotten = []  # it may have become another conversation
        prompt = tokens()
        whole = len(prompt)
        if context_policy == "shift" and whole > engine.ctx_size * 3 // 4:
            for turn in turns:
                seen = turn > first + len(self._forgotten)
                if seen and len(prompt) > engine.ctx_size // 2:
                    self._forgotten = self.messages[first:turn]
                    prompt = tokens()
        self._dropped = whole - len(prompt)
        return prompt

    def _counted(self, stats: Stats) -> Stats:
        return replace(stats, dropped_tokens=stats.dropped_tokens + self._dropped)

    def _keep(self, pieces: list[Piece]) -> None:
        """Put the answer into the conversation, its end token and anything after it left out."""
        sampled = tuple(piece.token for piece in pieces if piece.token is not None)
        if not sampled:
            return
        text = "".join(piece.text for piece in pieces)
        kept = sampled[:-1] if sampled[-1] in self._engine.tokenizer.eos_ids else sampled
        # a stop text is cut off the shown text, so its tokens are not the answer
        exact = self._engine.tokenizer.decode(kept, skip_special=True) == text
        self.messages.append(Message("assistant", text, kept if exact and kept else None))
