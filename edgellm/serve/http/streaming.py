"""Replies: one JSON object, or a stream of objects as server-sent events or as lines.

JSON is compact, because editors look for `"content":` without a space behind it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from edgellm.serve.http.body import ClientGoneError
from edgellm.serve.request_error import RequestError, request_error

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
JSON: TypeAlias = Mapping[str, Any] | list[Any]


@dataclass(frozen=True)
class Frame:
    """Event of a reply stream: JSON, or a text that is sent unchanged (`[DONE]`).

    Attributes:
        name: name of the event, in dialects that name events.
    """

    data: JSON | str
    name: str | None = None


@dataclass(frozen=True)
class Comment:
    """Comment of a reply stream, which clients ignore.

    Comments keep the connection open, and show people the progress of prefill.
    """

    text: str


KEEP_ALIVE = Comment("keep-alive")
Frames: TypeAlias = AsyncGenerator[Frame | Comment, None]


class Reply(Protocol):
    """Reply of an endpoint, which can be sent over ASGI."""

    async def send(self, send: Send) -> None:
        """Send the whole reply."""


@dataclass(frozen=True)
class BodyReply:
    """A reply whose body is complete."""

    body: bytes
    media_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    async def send(self, send: Send) -> None:
        headers = {"content-type": self.media_type, "content-length": str(len(self.body))}
        await _start(send, self.status, {**headers, **self.headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(
    value: JSON, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> BodyReply:
    return BodyReply(dump(value), "application/json", status, headers or {})


def dump(value: JSON) -> bytes:
    """Serialize a value as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class StreamReply:
    """A reply that is streamed frame by frame.

    Attributes:
        frames: frames of the reply. Nothing is sent before the first one, so that an error before
            it has a status of its own.
        error: function that returns the frames of an error in mid-stream.
        format: "sse": server-sent events; "lines": lines of JSON, which have no comments.
        beat: sent in silence: a comment, or an event for clients that count events alone.
        heartbeat_s: seconds of silence after which `beat` is sent.
        write_timeout_s: seconds in which the client has to read on.
    """

    frames: Frames
    error: Callable[[RequestError], list[Frame]]
    format: Literal["sse", "lines"] = "sse"
    beat: Frame | Comment = KEEP_ALIVE
    heartbeat_s: float
    write_timeout_s: float

    async def send(self, send: Send) -> None:
        async with aclosing(self.frames) as frames:
            try:
                first = await anext(frames)
            except StopAsyncIteration:
                first = Comment("")
            writer = _Writer(send, self)
            await writer.begin()
            beat = asyncio.create_task(writer.beat())
            try:
                await writer.write(first)
                async for frame in frames:
                    await writer.write(frame)
            except ClientGoneError:
                raise
            except Exception as error:
                for frame in self.error(request_error(error)):
                    await writer.write(frame)
            finally:
                beat.cancel()
                with suppress(asyncio.CancelledError, ClientGoneError):
                    await beat
        await send({"type": "http.response.body", "body": b""})


class _Writer:
    """Writer of a reply stream: sends frames, and heartbeat comments between them."""

    def __init__(self, send: Send, reply: StreamReply) -> None:
        self._send = send
        self._reply = reply
        self._sse = reply.format == "sse"
        self._sent_at = time.monotonic()
        self._one_write = asyncio.Lock()

    async def begin(self) -> None:
        media_type = "text/event-stream" if self._sse else "application/x-ndjson"
        headers = {
            "content-type": f"{media_type}; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # else nginx would hold frames back
        }
        await _start(self._send, 200, headers)

    async def write(self, frame: Frame | Comment) -> None:
        async with self._one_write:
            await self._write(frame)

    async def _write(self, frame: Frame | Comment) -> None:
        data = self._bytes(frame)
        if not data:
            return
        try:
            async with asyncio.timeout(self._reply.write_timeout_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientGoneError from None
        if isinstance(frame, Frame) or isinstance(self._reply.beat, Comment):
            self._sent_at = time.monotonic()

    async def beat(self) -> None:
        """Send a sign of life whenever an event stream was silent for `heartbeat_s`."""
        seconds = self._reply.heartbeat_s
        while self._sse:
            await asyncio.sleep(max(0.0, self._sent_at + seconds - time.monotonic()))
            async with self._one_write:  # a frame on its way is a sign of life, if not the last one
                if time.monotonic() - self._sent_at >= seconds:
                    await self._write(self._reply.beat)

    def _bytes(self, frame: Frame | Comment) -> bytes:
        if isinstance(frame, Comment):
            return f": {frame.text}\n\n".encode() if self._sse and frame.text else b""
        data = frame.data.encode() if isinstance(frame.data, str) else dump(frame.data)
        if not self._sse:
            return data + b"\n"
        name = b"" if frame.name is None else f"event: {frame.name}\n".encode()
        return name + b"data: " + data + b"\n\n"


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
