"""Clients that read slowly or not at all, send slowly, or stop in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from serving import LONG, PATH, Running, chat, connected, wire
from uvicorn.server import ServerState
from waiting import CEILING_S, until

from edgellm.serve.server import protocol

CHAT = chat("hi", max_tokens=3)
# Its reply of 13 MB is there at once.
LARGE = ("/tokenize", {"content": "ab" * (1 << 17), "with_pieces": True})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        LARGE,
        pytest.param(
            "/v1/completions",
            {"prompt": "a", "n": 9, "logprobs": 5, **LONG},
            marks=pytest.mark.slow,
        ),
        ("/v1/completions", {"prompt": "a", "n": 16, "logprobs": 5, "stream": True, **LONG}),
        pytest.param(
            "/api/generate",
            {"prompt": "a", "logprobs": True, "options": {"num_predict": 900}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["large", "whole", "stream", "lines"],
)
def test_a_client_that_never_reads(
    serving: Callable[..., Running], path: str, body: dict[str, Any]
) -> None:
    """Its answer ends and its connection is closed, whatever it was waiting for; others go on."""
    server = serving(write_timeout_s=0.5)
    with connected(server) as connection:
        connection.sendall(wire(path, body))
        until(lambda: server.arrived == 1)
        assert server.post(PATH, CHAT).status_code == 200
        until(lambda: server.deserted)


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_all(serving: Callable[..., Running]) -> None:
    """More than there is room for between the two, a little at a time."""
    server = serving()
    expected = server.post(*LARGE).content
    with connected(server, room=1 << 18) as connection:
        connection.sendall(wire(*LARGE))
        parts = []
        while sum(map(len, parts)) < len(expected):
            parts.append(connection.recv(1 << 16))
            assert parts[-1]
    assert b"".join(parts).endswith(expected)


class Timers:
    """An event loop whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Callable[[], None]) -> Mock:
        self._timers.append((self.now + seconds, function))
        return Mock()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [function for at, function in self._timers if at <= self.now]
        self._timers = [timer for timer in self._timers if timer[0] > self.now]
        for function in due:
            function()


def test_how_long_a_client_may_take() -> None:
    """The whole time from each byte that it has read, and no longer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        timers, transport = Timers(), Mock()
        transport.get_extra_info = lambda name: ours if name == "socket" else None
        transport.get_write_buffer_size.return_value = 0
        kind = protocol(read_timeout_s=1000, write_timeout_s=4)
        connection = kind(uvicorn.Config(Mock()), ServerState(), {}, timers)  # type: ignore[arg-type]
        connection.connection_made(transport)
        for unread in (900, 800, 0, 900):  # at 12 s there is nothing to read
            transport.get_write_buffer_size.return_value = unread
            for _ in range(4):
                timers.advance(1)
                transport.abort.assert_not_called()
        timers.advance(1)
        transport.abort.assert_called_once()


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 500,
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n"
        + b" " * 4000,
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\n \r\n" * 1000,
    ],
    ids=["headers", "body", "chunks"],
)
def test_many_who_send_a_little_at_a_time(serving: Callable[..., Running], data: bytes) -> None:
    """Slowloris: none of them gets more than the time there is, and others are answered."""
    server = serving(read_timeout_s=0.5)
    host, port = server.url.removeprefix("http://").split(":")

    async def dribble() -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            cut = data.index(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 60
            writer.write(data[:cut])
            with contextlib.suppress(ConnectionError):
                for at in range(cut, len(data)):
                    writer.write(data[at : at + 1])
                    await writer.drain()
                    if reader.at_eof():
                        break
                    await asyncio.sleep(0.02)
            with contextlib.suppress(ConnectionError):
                return await reader.read()
            return b""
        finally:
            writer.transport.abort()

    async def all_of_them() -> list[bytes]:
        many = [asyncio.create_task(dribble()) for _ in range(40)]
        await asyncio.to_thread(until, lambda: server.connections > 0)
        async with httpx.AsyncClient(timeout=CEILING_S, trust_env=False) as client:
            for _ in range(3):
                assert (await client.post(server.url + PATH, json=CHAT)).status_code == 200
        return await asyncio.gather(*many)

    for reply in asyncio.run(all_of_them()):
        assert reply.startswith(b"HTTP/1.1 408") or not reply
    until(lambda: server.connections == 0)


def test_bodies_that_break_off(server: Running) -> None:
    """Nothing is done for them, and nothing of them is left."""
    chance, data = random.Random(1), wire(PATH, {**CHAT, "messages": CHAT["messages"] * 500})
    for _ in range(50):
        with connected(server) as connection:
            connection.sendall(data[: chance.randrange(len(data))])
    until(lambda: server.deserted)
    assert server.post(PATH, CHAT).status_code == 200
