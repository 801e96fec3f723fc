"""A conversation over one session.

With the context policy `shift` whole turns are forgotten, the oldest first and the system prompt
never: when less than a quarter of the context is left, until half of it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from edgellm.answer import LogitFilter
from edgellm.engine import Engine
from edgellm.errors import CancelledError, OptionError
from edgellm.prefill import Progress
from edgellm.prompt import Message, encode_conversation
from edgellm.results import Completion, Piece, Stats
from edgellm.sampling import SamplingOptions
from edgellm.session import Session


class Chat:
    """Messages that take turns; earlier turns stay in the KV cache.

    Attributes:
        messages: the conversation so far; may be changed between turns.
        options: how answers are sampled; may be changed between turns.
    """

    def __init__(
        self, engine: Engine, options: SamplingOptions, *, system: str | None = None
    ) -> None:
        self._engine = engine
        self._session = Session(engine)
        self._completion: Completion | None = None
        self._forgotten = 0  # messages behind the system prompt that the model sees no more
        self._dropped = 0  # tokens of them, with the last answer
        self.options = options
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append(Message("system", system))

    @property
    def stats(self) -> Stats | None:
        """Of the last answer."""
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
        cancel: threading.Event | None = None,
        progress: Progress | None = None,
        logit_filter: LogitFilter | None = None,
    ) -> Completion:
        """Say something and get the whole answer."""
        self._completion = None
        for _ in self.stream(text, cancel=cancel, progress=progress, logit_filter=logit_filter):
            pass
        if self._completion is None:
            raise CancelledError("cancelled before the answer began")
        return self._completion

    def stream(
        self,
        text: str,
        *,
        cancel: threading.Event | None = None,
        progress: Progress | None = None,
        logit_filter: LogitFilter | None = None,
    ) -> Iterator[Piece]:
        """Say something and get the answer piece by piece.

        An answer that is cancelled stays in the conversation as far as it got. If anything fails
        before the answer begins, the conversation is as it was.
        """
        if not text.strip():
            raise OptionError("the message is empty")
        self.messages.append(Message("user", text))
        try:
            yield from self._answer(cancel, progress, logit_filter)
        finally:
            if self.messages[-1].role == "user":
                self.messages.pop()

    def regenerate(
        self, *, cancel: threading.Event | None = None, progress: Progress | None = None
    ) -> Iterator[Piece]:
        """Answer the last message once more, differently if the seed is open."""
        if not self.messages or self.messages[-1].role != "assistant":
            raise OptionError("there is no answer to generate again")
        previous = self.messages.pop()
        try:
            yield from self._answer(cancel, progress, None)
        finally:
            if self.messages[-1].role != "assistant":
                self.messages.append(previous)

    def close(self) -> None:
        self._session.close()

    def _answer(
        self,
        cancel: threading.Event | None,
        progress: Progress | None,
        logit_filter: LogitFilter | None,
    ) -> Iterator[Piece]:
        self._session.replace(self._prompt())
        pieces: list[Piece] = []
        try:
            for piece in self._session.stream(
                self.options, cancel=cancel, progress=progress, logit_filter=logit_filter
            ):
                if piece.stats is not None:
                    piece = replace(piece, stats=self._counted(piece.stats))
                pieces.append(piece)
                yield piece
        finally:
            self._keep(pieces)

    def _prompt(self) -> list[int]:
        """What the model sees of the conversation."""
        engine = self._engine
        first = int(self.messages[0].role == "system")
        turns = [i for i, m in enumerate(self.messages) if m.role == "user" and i > first]

        def tokens() -> list[int]:
            shown = self.messages[:first] + self.messages[first + self._forgotten :]
            return encode_conversation(shown, engine.template, engine.tokenizer)

        seen = self.messages[first + self._forgotten :]
        if self.options.context_policy == "error" or not seen or seen[0].role != "user":
            self._forgotten = 0  # it may have become another conversation
        found = tokens()
        whole = len(found)
        if self.options.context_policy == "shift" and whole > engine.ctx_size * 3 // 4:
            for turn in turns:
                if turn > first + self._forgotten and len(found) > engine.ctx_size // 2:
                    self._forgotten = turn - first
                    found = tokens()
        self._dropped = whole - len(found)
        return found

    def _counted(self, stats: Stats) -> Stats:
        return replace(stats, dropped_tokens=stats.dropped_tokens + self._dropped)

    def _keep(self, pieces: list[Piece]) -> None:
        """Put the answer into the conversation, its end token and anything after it left out."""
        sampled = tuple(p.token for p in pieces if p.token is not None)
        stats = self.stats
        if not sampled or stats is None:
            return
        text = "".join(piece.text for piece in pieces)
        reason = pieces[-1].finish_reason or "cancelled"
        self._completion = Completion(
            text,
            sampled,
            tuple(p.logprob or 0.0 for p in pieces if p.token is not None),
            reason,
            stats,
        )
        kept = sampled[:-1] if sampled[-1] in self._engine.tokenizer.eos_ids else sampled
        # a stop text is cut off the shown text, so its tokens are not the answer
        exact = self._engine.tokenizer.decode(kept, skip_special=True) == text
        self.messages.append(Message("assistant", text, kept if exact and kept else None))
