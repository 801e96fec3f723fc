"""HTTP requests on their way from the front, which has read them, to a replica's application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from edgellm.ray.request_prefix import request_prefix
from edgellm.serve.application import path_error
from edgellm.serve.http.body import ClientGoneError, Receive, read_body
from edgellm.serve.http.endpoint import CLIENT, Scope, while_connected
from edgellm.serve.http.guard import Guard
from edgellm.serve.http.json_body import parse_fields
from edgellm.serve.http.streaming import Send
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError, request_error

Message: TypeAlias = MutableMapping[str, Any]
# What of an ASGI scope says what is asked, and can be sent.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class ForwardedRequest:
    """A request that has been read.

    Attributes:
        scope: of ASGI.
        prefix: the names of the beginnings of its prompt (`request_prefix.py`).
    """

    scope: dict[str, Any]
    body: bytes
    prefix: list[bytes]


Replicas = Callable[[ForwardedRequest], AsyncGenerator[list[Message], None]]


def front_app(replicas: Replicas, options: ServeOptions) -> Starlette:
    """The application that clients see: it lets requests in as any server does, reads them, and
    hands them on.

    Args:
        replicas: has one of them answer, which gives ASGI messages as they come.
    """
    front = _Front(replicas, options)
    return Starlette(
        routes=[Mount("/", front)],
        middleware=[Middleware(Guard, options=options, error=path_error)],
    )


class _Front:
    def __init__(self, replicas: Replicas, options: ServeOptions) -> None:
        self._replicas = replicas
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._options
        try:
            body = await read_body(
                receive, limit=options.max_body_bytes, timeout_s=options.read_timeout_s
            )
        except ClientGoneError:
            return
        except RequestError as error:
            return await path_error(scope["path"], error).send(send)
        await while_connected(self._hand_on(scope, body, send), receive)

    async def _hand_on(self, scope: Scope, body: bytes, send: Send) -> None:
        prefix = await asyncio.to_thread(_prefix, body, scope[CLIENT].salt) if body else []
        kept = {name: scope[name] for name in _SCOPE if name in scope}
        started = False
        try:
            async with aclosing(self._replicas(ForwardedRequest(kept, body, prefix))) as answer:
                async for messages in answer:
                    for message in messages:
                        started = True
                        await send(message)
        except Exception as error:
            if started:
                raise
            await path_error(scope["path"], request_error(error)).send(send)


def _prefix(body: bytes, salt: str) -> list[bytes]:
    """Of a body that a replica will say what is wrong with, if something is, none."""
    try:
        return request_prefix(parse_fields(body).values, salt=salt)
    except RequestError:
        return []


async def answered(
    app: Callable[[Scope, Receive, Send], Awaitable[None]], request: ForwardedRequest
) -> AsyncGenerator[list[Message], None]:
    """What an application answers: all messages that are there at once, as they come.

    Whoever closes this has gone: the application is cancelled.
    """
    unread: list[Message] = [{"type": "http.request", "body": request.body}]
    messages: list[Message] = []
    news = asyncio.Event()

    async def receive() -> Message:
        if unread:
            return unread.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        messages.append(message)
        news.set()

    work = asyncio.ensure_future(app(dict(request.scope), receive, send))
    work.add_done_callback(lambda _: news.set())
    try:
        while messages or not work.done():
            await news.wait()
            news.clear()
            # before the yield: the application goes on while the taker is at work
            taken, messages[:] = messages[:], []
            if taken:
                yield taken
        work.result()
    finally:
        work.cancel()
        await asyncio.wait([work])
