"""Forwarding of HTTP requests from the front, which reads them, to a replica's application."""

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
from edgellm.serve.http.body import ClientGoneError, Receive, parse_fields, read_body
from edgellm.serve.http.endpoint import CLIENT, Scope, while_connected
from edgellm.serve.http.guard import Guard
from edgellm.serve.http.streaming import Send
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError, request_error

Message: TypeAlias = MutableMapping[str, Any]
# Keys of an ASGI scope that describe the request and can be sent to another process.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request that the front has read.

    Attributes:
        scope: ASGI scope, as far as it can be sent.
        body: body of the request.
        prefix: names of the beginnings of the request's prompt (see `request_prefix.py`).
    """

    scope: dict[str, Any]
    body: bytes
    prefix: list[bytes]


Replicas = Callable[[ForwardedRequest], AsyncGenerator[list[Message], None]]


def front_app(replicas: Replicas, options: ServeOptions) -> Starlette:
    """Build the ASGI application that clients see.

    Requests are checked as in any server, read, and handed to a replica.

    Args:
        replicas: function that has a replica answer a request, and yields the answer's ASGI
            messages as they arrive.
        options: options of the server.
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
    """Return the names of the beginnings of a request's prompt.

    Empty if the body is wrong; the replica will answer with the error.
    """
    try:
        return request_prefix(parse_fields(body).values, salt=salt)
    except RequestError:
        return []


async def answered(
    app: Callable[[Scope, Receive, Send], Awaitable[None]], request: ForwardedRequest
) -> AsyncGenerator[list[Message], None]:
    """Yield lists of ASGI messages of an application's answer as they arrive.

    Messages that are there at once are in one list. Closing the generator, because the client has
    gone, cancels the application.
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
            # taken before the yield: the application adds messages while the caller works
            taken, messages[:] = messages[:], []
            if taken:
                yield taken
        work.result()
    finally:
        work.cancel()
        await asyncio.wait([work])
