"""Clients that read slowly or not at all, send slowly, or stop in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from serving import LONG, PATH, Running, chat, connected, wire
from waiting import until

CHAT = chat("hi", max_tokens=3)
# Its reply of 13 MB is there at once.
LARGE = ("/tokenize", {"content": "ab" * (1 << 17), "with_pieces": True})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        LARGE,
        ("/v1/completions", {"prompt": "a", "n": 9, "logprobs": 5, **LONG}),
        ("/v1/completions", {"prompt": "a", "n": 16, "logprobs": 5, "stream": True, **LONG}),
        ("/api/generate", {"prompt": "a", "logprobs": True, "options": {"num_predict": 900}}),
    ],
    ids=["large", "whole", "stream", "lines"],
)
def test_a_client_that_never_reads(
    serving: Callable[..., Running], path: str, body: dict[str, Any]
) -> None:
    """Its answer ends and its connection is closed, whatever it was waiting for; others go on."""
    server = serving(write_timeout_s=1)
    with connected(server) as connection:
        connection.sendall(wire(path, body))
        until(lambda: server.connections == 1, seconds=10)
        assert server.post(PATH, CHAT).status_code == 200
        until(lambda: server.connections == 0, seconds=30)
        assert server.live == 0
        assert server.used_blocks == 0
        assert server.answering.metrics.running == 0


def test_a_client_that_reads_slowly_gets_all(serving: Callable[..., Running]) -> None:
    server = serving(write_timeout_s=1)
    expected = server.post(*LARGE).content
    with connected(server, room=1 << 18) as connection:
        connection.sendall(wire(*LARGE))
        parts, begin = [], time.monotonic()
        while sum(map(len, parts)) < len(expected):
            part = connection.recv(1 << 19)
            assert part
            parts.append(part)
            slow = time.monotonic() - begin < 3
            time.sleep(0.2 if slow else 0)
    assert b"".join(parts).endswith(expected)


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
    server = serving(read_timeout_s=1)
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
                    await asyncio.sleep(0.05)
            with contextlib.suppress(ConnectionError):
                return await asyncio.wait_for(reader.read(), 10)
            return b""
        finally:
            writer.transport.abort()

    async def all_of_them() -> list[bytes]:
        many = [asyncio.create_task(dribble()) for _ in range(200)]
        await asyncio.sleep(0.5)
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            for _ in range(3):
                assert (await client.post(server.url + PATH, json=CHAT)).status_code == 200
        return await asyncio.gather(*many)

    for reply in asyncio.run(asyncio.wait_for(all_of_them(), 40)):
        assert reply.startswith(b"HTTP/1.1 408") or not reply
    until(lambda: server.connections == 0)


def test_bodies_that_break_off(server: Running) -> None:
    """Nothing is done for them, and nothing of them is left."""
    chance, data = random.Random(1), wire(PATH, {**CHAT, "messages": CHAT["messages"] * 500})
    waiting = server.answering.metrics.waiting
    for _ in range(50):
        with connected(server) as connection:
            connection.sendall(data[: chance.randrange(len(data))])
    until(lambda: server.connections == 0)
    assert server.answering.metrics.waiting == waiting
    assert server.live == 0
    assert server.post(PATH, CHAT).status_code == 200
