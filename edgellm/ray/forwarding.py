"""Forwarding of HTTP requests from the front, which reads them, to a replica's application.

The beginnings of a request's prompt choose the replica. The front, without tokenizer and template,
names them as blocks of the KV cache are (see `prefix_index.py`), but from the texts that a model
reads, in the order in which most templates have them: system messages, tools, the rest. The layout
of the JSON does not count, nor do other fields: all replicas have one model, whatever clients call
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from edgellm.serve.anthropic.messages import BILLING, GIT_STATUS
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
# Bytes of a piece: about as many tokens as a block of the KV cache has.
_PIECE = 512
# Maximum of bytes of one request that are named; text after them does not count.
_MOST_BYTES = 256 * _PIECE
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request that the front has read.

    Attributes:
        scope: ASGI scope, as far as it can be sent.
        body: body of the request.
        prefix: names of the beginnings of the request's prompt (see `request_prefixes`).
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
        try:
            body = await read_body(receive, self._options)
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


def request_prefix(fields: Mapping[str, object], *, salt: str = "") -> list[bytes]:
    """Name the beginnings of the text that a model reads of a request, shortest first.

    Args:
        fields: fields of the request's body, in any dialect.
        salt: salt of the names; only requests with the same salt share names.
    """
    data = bytearray()
    for text in _read(fields):
        data += text.encode("utf-8", "surrogatepass")
        if len(data) >= _MOST_BYTES:
            break
    names, name = [], hashlib.sha256(salt.encode()).digest()
    for end in range(_PIECE, min(len(data), _MOST_BYTES) + 1, _PIECE):
        name = hashlib.sha256(name + data[end - _PIECE : end]).digest()
        names.append(name)
    return names


def _read(fields: Mapping[str, object]) -> Iterator[str]:
    """Yield the texts that the model reads of a request, in order; wrong requests are accepted."""
    messages = [_message("system", fields.get(name)) for name in ("system", "instructions")]
    for name in ("messages", "input"):
        given = fields.get(name)
        messages += given[:_MOST_BYTES] if isinstance(given, list) else [_message("user", given)]
    first = next((i for i, each in enumerate(messages) if not _is_system(each)), len(messages))
    yield from map(_told, messages[:first])
    for name in ("tools", "input_extra"):
        yield _text(fields.get(name))
    yield from map(_told, messages[first:])
    for name in ("input_prefix", "prompt"):
        yield _text(fields.get(name))


def _message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content} if content else {}


def _is_system(message: object) -> bool:
    return not message or (isinstance(message, dict) and message.get("role") in _SYSTEM)


def _told(message: object) -> str:
    """Return a message as text: role, content, and other fields in alphabetical order."""
    if not message:
        return ""
    if not isinstance(message, dict) or "role" not in message:
        return _text(message)
    role = "system" if message["role"] in _SYSTEM else message["role"]
    more = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and value is not None
    }
    return f"{role}\n{_text(message.get('content'))}{_text(more or None)}\n"


def _text(value: object) -> str:
    """Return a value as text.

    Texts are taken as they are, also in a list or as the `text` of a part; other values as JSON.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        value = value[:_MOST_BYTES]
        if any(isinstance(item, int | float) for item in value[:1]):  # tokens
            return json.dumps(value)
        texts = (_text(item) for item in value)
        system = "".join(text for text in texts if not text.startswith(BILLING))
        return system.partition(GIT_STATUS)[0]
    if isinstance(value, dict):
        if isinstance(value.get("text"), str) and "type" in value:
            return str(value["text"])
        # `cache_control` moves to another part in the next request of a conversation
        value = {name: item for name, item in value.items() if name != "cache_control"}
    return f"{json.dumps(value, ensure_ascii=False, sort_keys=True)} "
