"""A conversation over one session.

With the context policy `shift` whole turns are forgotten, the oldest first and the system prompt
never. Turns are forgotten when less than a quarter of the context is left, until half is left.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

from edgellm.checks import check_text
from edgellm.engine.call import CALL_NAMES, Call, ChatCallArguments, checked_call
from edgellm.engine.chat_prompt import (
    AnswerReader,
    ChatPrompt,
    ToolOptions,
    chat_prompt,
    split_arguments,
)
from edgellm.engine.engine import Engine
from edgellm.engine.loop import Pending, aiterate, iterate
from edgellm.errors import OptionError
from edgellm.generation_options import (
    GenerationArguments,
    GenerationOptions,
    changed_options,
)
from edgellm.results import Completion, Piece, Stats, completion
from edgellm.session import Session, check_session
from edgellm.text.prompt import Message
from edgellm.tool_use import ToolCall, joined_calls


class Chat:
    """A conversation of user and model; earlier turns stay in the KV cache.

    `close` gives its place in the cache back, as do `with` and, later, the garbage collector.

    Attributes:
        messages: the conversation so far; may be changed between turns.
        options: sampling options of answers; may be changed between turns.
        tool_options: tools that answers may call; may be changed between turns.
    """

    def __init__(
        self,
        engine: Engine,
        options: GenerationOptions,
        *,
        system: str | None = None,
        session: Session | None = None,
        tool_options: ToolOptions | None = None,
    ) -> None:
        self._engine = engine
        self._session = Session(engine)
        if session is not None:
            self._session = check_session(session, engine).fork()
            options = replace(options, adapter=options.adapter or self._session._adapter)
        self._forgotten: list[Message] = []  # behind the system prompt; not shown to the model
        self._dropped = 0  # number of their tokens, at the last answer
        self._turn = threading.Lock()  # held by the answer that is on its way
        self.options = options
        self.tool_options = ToolOptions() if tool_options is None else tool_options
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
        """Tokens of the conversation as the model saw it."""
        return self._session.tokens

    def send(self, text: str | None = None, **arguments: Unpack[ChatCallArguments]) -> Completion:
        """Say something and return the whole answer; see `stream`.

        An answer that was stopped is returned as far as it got, see `Session.generate`. An answer
        that ended before its first token is empty, and the conversation is as it was.
        """
        return completion(list(self.stream(text, **arguments)))

    def stream(
        self, text: str | None = None, **arguments: Unpack[ChatCallArguments]
    ) -> Iterator[Piece]:
        """Say something and stream the answer piece by piece.

        The model's reasoning before the answer comes as `Piece.reasoning`, its tool calls as
        `Piece.tool_calls`; `Piece.text` is the answer alone, as llama-server's `content` is.

        An answer that is cancelled stays in the conversation as far as it got. If anything fails
        before the answer begins, the conversation is as it was.

        Args:
            text: the user's message; None: go on behind the results of tools.
            arguments: see `CallArguments`, and `ToolArguments`; those that are given are over the
                chat's, for this answer.
        """
        pending = self._say(text, *self._call(arguments))
        return iterate(self._engine.loop, pending)

    async def asend(
        self, text: str | None = None, **arguments: Unpack[ChatCallArguments]
    ) -> Completion:
        """Say something and return the whole answer, as `send` does, for asyncio; see `astream`."""
        pending = self._say(text, *self._call(arguments))
        return completion([piece async for piece in aiterate(self._engine.loop, pending)])

    def astream(
        self, text: str | None = None, **arguments: Unpack[ChatCallArguments]
    ) -> AsyncGenerator[Piece, None]:
        """Stream the answer as `stream` does, for asyncio; see `Session.astream`."""
        pending = self._say(text, *self._call(arguments))
        return aiterate(self._engine.loop, pending)

    def regenerate(self, **arguments: Unpack[ChatCallArguments]) -> Iterator[Piece]:
        """Stream another answer in place of the last one, a different one if the seed is open.

        See `stream`.
        """
        pending = self._say_again(*self._call(arguments))
        return iterate(self._engine.loop, pending)

    def aregenerate(self, **arguments: Unpack[ChatCallArguments]) -> AsyncGenerator[Piece, None]:
        """Stream another answer as `regenerate` does, for asyncio; see `Session.astream`."""
        pending = self._say_again(*self._call(arguments))
        return aiterate(self._engine.loop, pending)

    def add_tool_result(self, call_id: str, text: str) -> None:
        """Add the result of a tool call of the last answer.

        Once all calls have a result, `stream()` or `send()` without a text goes on.

        Raises:
            OptionError: no tool call of this id waits for its result.
        """
        check_text("call_id", call_id)
        check_text("text", text)
        waiting = {call.id: call for call in self._calls_without_result()}
        if call_id not in waiting:
            known = ", ".join(waiting) or "none"
            raise OptionError(f"`call_id` is {call_id!r:.60}; calls without a result: {known}")
        name = waiting[call_id].name
        self.messages.append(Message("tool", text, tool_call_id=call_id, name=name))

    def __repr__(self) -> str:
        name, count = self._engine.bundle.manifest.name, len(self.messages)
        return f"<edgellm.Chat with {name}: {count} messages, {len(self._session.tokens)} tokens>"

    def close(self) -> None:
        """Give the memory of the KV cache back; the messages stay."""
        self._session.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, arguments: ChatCallArguments) -> tuple[Call, ToolOptions]:
        own, tools = split_arguments(arguments, *CALL_NAMES)

        def choose(
            options: GenerationOptions | None, over: GenerationArguments
        ) -> GenerationOptions:
            return changed_options(self.options if options is None else options, over)

        return checked_call(self._engine, own, choose), self.tool_options.changed(tools)

    def _say(self, text: str | None, call: Call, tool_options: ToolOptions) -> Pending[Piece]:
        if text is not None:
            check_text("text", text)
            if not text.strip():
                raise OptionError("the message is empty")
        with self._taking_turns():
            self._check_results(going_on=text is None)
            asked = [] if text is None else [Message("user", text)]
            try:  # an interrupt may come behind every call
                self.messages.extend(asked)
                yield from self._answer(call, tool_options)
            finally:
                if asked and self.messages and self.messages[-1] is asked[0]:
                    self.messages.pop()

    def _say_again(self, call: Call, tool_options: ToolOptions) -> Pending[Piece]:
        with self._taking_turns():
            roles = [message.role for message in self.messages[-2:]]
            if roles not in (["user", "assistant"], ["tool", "assistant"]):
                raise OptionError("there is no answer to generate again")
            previous = self.messages[-1]
            try:
                self.messages.pop()
                yield from self._answer(call, tool_options)
            finally:
                if self.messages[-1].role != "assistant":
                    self.messages.append(previous)

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """Hold the chat's turn: one answer at a time.

        Raises:
            OptionError: another answer is on its way.
        """
        # `for` has the result in a variable before an interrupt can come
        for taken in map(self._turn.acquire, (False,)):
            if not taken:
                raise OptionError(
                    "the chat is already answering; take that answer to its end or close its "
                    "stream, or open another chat"
                )
            try:
                yield
            finally:
                self._turn.release()

    def _answer(self, call: Call, tool_options: ToolOptions) -> Pending[Piece]:
        prompt = self._prompt(call, tool_options)
        self._session.replace(prompt.tokens)
        reader = prompt.reader()
        pieces: list[Piece] = []
        pending = self._session._pending(
            replace(call, logit_filter=prompt.logit_filter), shown_special=prompt.shown_special
        )
        try:
            for item in pending:
                if isinstance(item, Piece):
                    if item.stats is not None:
                        item = replace(item, stats=self._counted(item.stats))
                    item = reader.read(item)
                    pieces.append(item)
                yield item
        finally:
            self._keep(pieces, reader)

    def _prompt(self, call: Call, tool_options: ToolOptions) -> ChatPrompt:
        """Return the prompt of the conversation, without the turns that are forgotten.

        With a context policy that forgets, turns are forgotten here if need be.
        """
        engine, forgets = self._engine, call.options.when_full.forgets
        first = int(self.messages[0].role == "system")
        turns = [i for i, m in enumerate(self.messages) if m.role == "user" and i > first]

        def asked() -> ChatPrompt:
            shown = self.messages[:first] + self.messages[first + len(self._forgotten) :]
            return chat_prompt(engine, shown, tool_options, logit_filter=call.logit_filter)

        begin = self.messages[first : first + len(self._forgotten)]
        if not forgets or begin != self._forgotten:
            self._forgotten = []  # `messages` may have become another conversation
        prompt = asked()
        whole = len(prompt.tokens)
        if forgets and whole > engine.ctx_size * 3 // 4:
            for turn in turns:
                seen = turn > first + len(self._forgotten)
                if seen and len(prompt.tokens) > engine.ctx_size // 2:
                    self._forgotten = self.messages[first:turn]
                    prompt = asked()
        self._dropped = whole - len(prompt.tokens)
        return prompt

    def _check_results(self, *, going_on: bool) -> None:
        """Refuse to answer while calls have no results, or without anything to answer.

        Raises:
            OptionError: a result or a text is missing; the message has the details.
        """
        waiting = self._calls_without_result()
        if waiting:
            names = ", ".join(f"{call.id} ({call.name})" for call in waiting)
            raise OptionError(f"calls wait for their results: {names}; see `add_tool_result`")
        if going_on and (not self.messages or self.messages[-1].role not in ("user", "tool")):
            raise OptionError(
                "`text` is None, but no tool's result waits for an answer; give a text"
            )

    def _calls_without_result(self) -> list[ToolCall]:
        """Return the tool calls of the last answer that have no result yet."""
        results = set()
        for message in reversed(self.messages):
            if message.role != "tool":
                return [call for call in message.tool_calls if call.id not in results]
            results.add(message.tool_call_id)
        return []

    def _counted(self, stats: Stats) -> Stats:
        return replace(stats, dropped_tokens=stats.dropped_tokens + self._dropped)

    def _keep(self, pieces: list[Piece], reader: AnswerReader) -> None:
        """Put the answer into the conversation, its end token left out.

        A tool call that is not complete is left out as well: no template takes it.
        """
        sampled = tuple(piece.token for piece in pieces if piece.token is not None)
        if not sampled:
            return
        kept = sampled[:-1] if sampled[-1] in self._engine.tokenizer.eos_ids else sampled
        text = "".join(piece.text for piece in pieces)
        made = joined_calls([call for piece in pieces for call in piece.tool_calls])
        calls = tuple(call for call in made if call.complete)
        reasoning = "".join(piece.reasoning for piece in pieces) or None
        # a stop text is cut off the shown text, so the tokens are not exactly the answer
        exact = reader.is_text_of(kept, self._engine.tokenizer) and calls == made
        if not calls and reasoning is None:
            exact = exact and reader.raw == text
        tokens = kept if exact and kept else None
        self.messages.append(
            Message("assistant", text, tokens, reasoning=reasoning, tool_calls=calls)
        )
