"""Endpoints: routes of a dialect as ASGI applications.

A dialect is a table of routes and a way to write an error. A route's handler takes a `Call` and
returns a `Reply`; it raises `RequestError`, or any error of edgellm's. It may wait for any time:
when its client disconnects, the handler is cancelled, and its asks are withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
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
from edgellm.serve.events import Begun, Client, Delta, End, Event, PromptProgress
from edgellm.serve.http.body import ClientGoneError, Receive, read_body, read_fields
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import (
    JSON,
    KEEP_ALIVE,
    Comment,
    Frame,
    Frames,
    Reply,
    Send,
    StreamReply,
    json_reply,
)
from edgellm.serve.request_error import RequestError, request_error
from edgellm.tool_use import ToolCall, joined_calls

# Asks of one request in the queue at once; its further prompts leave the queue to other clients.
_MOST_WAITING = 4
_MOST_PARAMETERS = 100  # in the query of a URL
Scope = MutableMapping[str, Any]
CLIENT = "edgellm.client"  # key of the `Client` that the guard puts into an ASGI scope
ANSWERED = "edgellm.answered"  # key of the request log's list of `AnswerNote`s


@dataclass(frozen=True)
class AnswerNote:
    """Facts about an answer for the request log.

    Attributes:
        end: reason why the answer ended, or went no further.
        stats: counts and timings of the answer; None where it was cut off.
    """

    model: str
    prompt_tokens: int
    end: str
    stats: Stats | None = None


@dataclass
class Answered:
    """A whole answer: its deltas joined, and its end."""

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
    """A request as a handler sees it.

    Attributes:
        path_values: values of the parameters in the route's path.
        body: whole body of the request.
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
        """Return a parameter of the URL's query; None if it is missing.

        Raises:
            RequestError: the URL has more than 100 parameters.
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
        """Parse the body as a JSON object, and return its fields; see `read_fields`."""
        return await read_fields(self.body)

    def events(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Answer an ask as a stream of events; see `Answering.answer`."""
        events = self.answering.answer(ask, self.client)
        answered = self.scope.get(ANSWERED)
        return events if answered is None else _noted(events, ask.n, answered)

    async def answers(self, ask: Ask) -> tuple[Begun, list[Answered]]:
        """Return `Begun` and all finished answers of an ask."""
        (answers,) = await self.all_answers([ask])
        return answers

    def all_events(self, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Event], None]:
        """Answer several asks as one stream of events, each with the number of its ask."""
        most_waiting = min(_MOST_WAITING, self.answering.options.max_waiting)
        return together([self.events(ask) for ask in asks], most_waiting=most_waiting)

    async def all_answers(self, asks: Sequence[Ask]) -> list[tuple[Begun, list[Answered]]]:
        """Return `Begun` and all finished answers of each of several asks."""
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
        """Refuse several asks if one of them cannot be answered, before the reply begins.

        A single ask needs no check: its errors come before its first frame.

        Raises:
            RequestError, EdgeLLMError: see `Answering.check`.
        """
        if len(asks) > 1:
            await self.answering.check(asks)

    def stream(
        self,
        frames: Frames,
        *,
        format: Literal["sse", "lines"] = "sse",
        beat: Frame | Comment = KEEP_ALIVE,
    ) -> StreamReply:
        """Return a reply that streams `frames`, with the server's heartbeat and time limit.

        Args:
            beat: see `StreamReply`.
        """
        options = self.answering.options
        return StreamReply(
            frames=frames,
            error=self.dialect.frames,
            format=format,
            beat=beat,
            heartbeat_s=options.heartbeat_s,
            write_timeout_s=options.write_timeout_s,
        )


Handler = Callable[[Call], Awaitable[Reply]]


@dataclass(frozen=True)
class Route:
    """A path pattern in Starlette's syntax, and its handlers by HTTP method."""

    path: str
    handlers: Mapping[str, Handler]


@dataclass(frozen=True)
class Dialect:
    """An API dialect: its routes, and the form of its errors.

    Attributes:
        error_body: function that returns the body of an error.
        error_frames: function that returns the frames of an error in mid-stream, which clients
            raise; None: one frame with the body.
        status: function that returns the HTTP status of an error.
        owns: whether errors at a path without a route are written in this dialect.
    """

    name: str
    routes: Sequence[Route]
    error_body: Callable[[RequestError], JSON]
    error_frames: Callable[[RequestError], list[Frame]] | None = None
    status: Callable[[RequestError], int] = lambda error: error.status
    owns: Callable[[str], bool] = lambda _: False

    def error(self, error: RequestError) -> Reply:
        body = self.error_body(error)
        return json_reply(body, status=self.status(error), headers=error.headers)

    def frames(self, error: RequestError) -> list[Frame]:
        """Return the frames of an error in mid-stream."""
        if self.error_frames is None:
            return [Frame(self.error_body(error))]
        return self.error_frames(error)


class Endpoint:
    """ASGI application of one route: reads the body, runs the handler and sends its reply."""

    def __init__(self, route: Route, dialect: Dialect, answering: Answering) -> None:
        self._route = route
        self._dialect = dialect
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, self._answering.options)
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
            except OSError:  # the client has gone, in the words of ASGI servers
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


async def framed(
    events: AsyncGenerator[Event, None],
    of: Callable[[Event], Iterable[Frame | Comment]],
    last: Callable[[], Iterable[Frame]] = tuple,
) -> Frames:
    """Convert the events of an ask to frames, with comments on the progress of its prompt.

    Args:
        of: returns the frames of an event; the first event is `Begun`.
        last: returns the frames behind those of all events.
    """
    async with aclosing(events):
        async for event in events:
            if isinstance(event, PromptProgress):
                yield Comment(f"prompt {event.done}/{event.total}")
            for frame in of(event):
                yield frame
    for frame in last():
        yield frame


async def _noted(
    events: AsyncGenerator[Event, None], count: int, answered: list[AnswerNote]
) -> AsyncGenerator[Event, None]:
    """Yield the events of `count` answers, and append a note of how each ended to `answered`."""
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
    """Run `work`, and cancel it when the client disconnects.

    Args:
        receive: ASGI's `receive`, after the whole body was read.
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


async def together(
    streams: Sequence[AsyncGenerator[Event, None]], *, most_waiting: int
) -> AsyncGenerator[tuple[int, Event], None]:
    """Merge event streams: yield each event as it comes, with the number of its stream.

    When one stream fails, its error is raised, and the asks of the others are withdrawn.

    Args:
        most_waiting: largest number of streams that have begun and have no delta yet. Further
            streams begin when one of these has a delta, so that a request of many prompts finds
            room in the queue.
    """
    may_wait = asyncio.Semaphore(most_waiting)
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(maxsize=1)

    async def forward(number: int, stream: AsyncGenerator[Event, None]) -> None:
        await may_wait.acquire()
        waits = True
        try:
            async with aclosing(stream):
                async for event in stream:
                    if waits and isinstance(event, Delta | End):
                        may_wait.release()
                        waits = False
                    await queue.put((number, event))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)
        finally:
            if waits:
                may_wait.release()

    tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
