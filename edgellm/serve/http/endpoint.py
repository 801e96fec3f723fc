"""A route's way from ASGI to a dialect and back.

A dialect is a table of routes and a way to write an error. A route's handler takes a `Call` and
gives a `Reply`; it raises `RequestError`, or any error of edgellm's, and waits as long as it likes:
it is cancelled when its client goes away, and with it all that it has asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs

from edgellm.results import FinishReason, Piece, Stats
from edgellm.serve.answering import Answering
from edgellm.serve.ask import Ask
from edgellm.serve.events import Begun, Client, Delta, End, Event
from edgellm.serve.http.body import ClientGoneError, Receive, read_body
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.json_body import read_fields
from edgellm.serve.http.streaming import JSON, Frame, Frames, Reply, Send, StreamReply, json_reply
from edgellm.serve.request_error import RequestError, request_error
from edgellm.serve.together import together
from edgellm.tool_use import ToolCall, joined_calls

# Asks of one request that wait at once: the others of its prompts leave the queue to other clients.
_MOST_WAITING = 4
_MOST_PARAMETERS = 100  # of a URL
Scope = MutableMapping[str, Any]
CLIENT = "edgellm.client"  # where the guard leaves it in an ASGI scope
ANSWERED = "edgellm.answered"  # where the request log wants an `AnswerNote` of each answer


@dataclass(frozen=True)
class AnswerNote:
    """What the request log tells of an answer.

    Attributes:
        end: why it ended, or went no further.
        stats: None where it has no end.
    """

    model: str
    prompt_tokens: int
    end: str
    stats: Stats | None = None


@dataclass
class Answered:
    """A whole answer."""

    deltas: list[Delta] = field(default_factory=list)
    end: End | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def reasoning(self) -> str:
        return "".join(delta.reasoning for delta in self.deltas)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return joined_calls([call for delta in self.deltas for call in delta.calls])

    @property
    def pieces(self) -> list[Piece]:
        return [piece for delta in self.deltas for piece in delta.pieces]

    @property
    def stats(self) -> Stats:
        assert self.end is not None
        return self.end.stats

    @property
    def finish_reason(self) -> FinishReason:
        assert self.end is not None
        return self.end.finish_reason


@dataclass(frozen=True)
class Call:
    """A request in the hands of a handler.

    Attributes:
        path_values: of the parameters in the route's path.
        body: all of it.
    """

    answering: Answering
    dialect: Dialect
    client: Client
    scope: Scope
    body: bytes

    @property
    def path_values(self) -> Mapping[str, Any]:
        values: Mapping[str, Any] = self.scope.get("path_params", {})
        return values

    def header(self, name: str) -> str | None:
        wanted = name.lower().encode()
        pairs: list[tuple[bytes, bytes]] = self.scope["headers"]
        return next((value.decode("latin-1") for key, value in pairs if key == wanted), None)

    def query(self, name: str) -> str | None:
        """Read a parameter of the URL.

        Raises:
            RequestError: there are too many.
        """
        query: bytes = self.scope["query_string"]
        try:
            values = parse_qs(query.decode("latin-1"), max_num_fields=_MOST_PARAMETERS).get(name)
        except ValueError:
            raise RequestError(
                "invalid_request",
                f"the URL has more than the {_MOST_PARAMETERS} parameters that are allowed",
            ) from None
        return values[0] if values else None

    async def fields(self) -> Fields:
        """The body's fields; see `read_fields`."""
        return await read_fields(self.body)

    def events(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """What comes of an ask; see `Answering.answer`."""
        events = self.answering.answer(ask, self.client)
        answered = self.scope.get(ANSWERED)
        return events if answered is None else _noted(events, ask.n, answered)

    async def answers(self, ask: Ask) -> tuple[Begun, list[Answered]]:
        """All of an ask's answers."""
        (answers,) = await self.all_answers([ask])
        return answers

    def all_events(self, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Event], None]:
        """What comes of several asks, each event with the number of its ask."""
        most_waiting = min(_MOST_WAITING, self.answering.options.max_waiting)
        return together([self.events(ask) for ask in asks], most_waiting=most_waiting)

    async def all_answers(self, asks: Sequence[Ask]) -> list[tuple[Begun, list[Answered]]]:
        """All answers to each of several asks."""
        answers = [[Answered() for _ in range(ask.n)] for ask in asks]
        begun: dict[int, Begun] = {}
        async with aclosing(self.all_events(asks)) as events:
            async for number, event in events:
                if isinstance(event, Begun):
                    begun[number] = event
                elif isinstance(event, Delta):
                    answers[number][event.sample].deltas.append(event)
                elif isinstance(event, End):
                    answers[number][event.sample].end = event
        return [(begun[number], of_one) for number, of_one in enumerate(answers)]

    async def check_all(self, asks: Sequence[Ask]) -> None:
        """Refuse what one of several asks has wrong while there is no reply yet; a single one says
        so before its first frame.

        Raises:
            RequestError, EdgeLLMError: see `Answering.check`.
        """
        if len(asks) > 1:
            await self.answering.check(asks)

    def stream(self, frames: Frames, *, format: Literal["sse", "lines"] = "sse") -> StreamReply:
        """A stream of frames, within the server's limits."""
        options = self.answering.options
        return StreamReply(
            frames=frames,
            error=self.dialect.error_frames,
            format=format,
            heartbeat_s=options.heartbeat_s,
            write_timeout_s=options.write_timeout_s,
        )


Handler = Callable[[Call], Awaitable[Reply]]


@dataclass(frozen=True)
class Route:
    """A path, as Starlette writes it, and its handlers by method."""

    path: str
    handlers: Mapping[str, Handler]


@dataclass(frozen=True)
class Dialect:
    """One API.

    Attributes:
        error_body: of an error.
        error_frames: of an error in mid-stream.
        status: of an error, where a dialect has its own.
        owns: whether errors of a path that no route has are written in this dialect.
    """

    name: str
    routes: Sequence[Route]
    error_body: Callable[[RequestError], JSON]
    error_frames: Callable[[RequestError], list[Frame]]
    status: Callable[[RequestError], int] = lambda error: error.status
    owns: Callable[[str], bool] = lambda _: False

    def error(self, error: RequestError) -> Reply:
        """An error as a reply."""
        body = self.error_body(error)
        return json_reply(body, status=self.status(error), headers=error.headers)


class Endpoint:
    """The ASGI application of a route."""

    def __init__(self, route: Route, dialect: Dialect, answering: Answering) -> None:
        self._route = route
        self._dialect = dialect
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._answering.options
        try:
            body = await read_body(
                receive, limit=options.max_body_bytes, timeout_s=options.read_timeout_s
            )
        except ClientGoneError:
            return
        except RequestError as error:
            return await self._dialect.error(error).send(send)
        client = scope.get(CLIENT, Client())
        call = Call(self._answering, self._dialect, client, scope, body)
        await while_connected(self._work(call, send), receive)

    async def _work(self, call: Call, send: Send) -> None:
        method = call.scope["method"]
        handler = self._route.handlers["GET" if method == "HEAD" else method]
        started = False

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            try:
                await send(message)
            except OSError:  # as ASGI servers say it
                raise ClientGoneError from None

        try:
            reply = await handler(call)
            await reply.send(noting)
        except ClientGoneError:
            return
        except Exception as error:
            if started:
                raise
            with suppress(ClientGoneError):
                await self._dialect.error(request_error(error)).send(noting)


async def _noted(
    events: AsyncGenerator[Event, None], count: int, answered: list[AnswerNote]
) -> AsyncGenerator[Event, None]:
    """The events of so many answers, with a note of how each ended."""
    begun: Begun | None = None
    ended, end = 0, "not read to the end"
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Begun):
                    begun = event
                elif isinstance(event, End):
                    assert begun is not None
                    ended += 1
                    tokens = event.stats.prompt_tokens
                    note = AnswerNote(begun.model, tokens, event.finish_reason, event.stats)
                    answered.append(note)
                yield event
    except RequestError as error:
        end = error.kind
        raise
    finally:
        if begun is not None:
            rest = AnswerNote(begun.model, len(begun.prompt), end)
            answered.extend([rest] * (count - ended))


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do some work, which is cancelled when the client has gone.

    Args:
        receive: of ASGI, behind the body.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task, gone})
    if not task.cancelled():
        task.result()


async def _gone(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
