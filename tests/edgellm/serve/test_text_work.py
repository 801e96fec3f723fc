"""Texts that are counted, split and put together: little at a time, beside answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import Running
from waiting import until

from edgellm.serve import text_work
from edgellm.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"content": "hi"}, "unavailable_error"),
    ("/detokenize", {"tokens": [5]}, "unavailable_error"),
    ("/apply-template", {"messages": MESSAGES}, "unavailable_error"),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}, "overloaded_error"),
    ("/completion", {"prompt": ["hi", 5], "n_predict": 1}, "unavailable_error"),
]


@pytest.mark.parametrize(("path", "body", "kind"), ROUTES)
def test_too_many_at_once(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], kind: str
) -> None:
    assert server.post(path, body).status_code == 200
    monkeypatch.setattr(server.answering.text_work, "_places", threading.Semaphore(0))
    rejected = server.answering.metrics.rejected["texts"]
    reply = server.post(path, body)
    assert reply.status_code in (503, 529)
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == kind
    assert server.answering.metrics.rejected["texts"] == rejected + 1


class Held:
    """Texts that a tokenizer does not come to the end of before it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.begun = 0
        encode = Tokenizer.encode

        def held(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
            if text == "hold":
                self.begun += 1
                assert self.free.wait(60)
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(Tokenizer, "encode", held)


def test_those_who_wait_do_not_hold_up_others(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers begin, and the event loop goes on, while all that may be is at work on texts."""
    server, held = serving(), Held(monkeypatch)
    places = server.answering.text_work._places
    with ThreadPoolExecutor(text_work._MOST) as threads:
        try:
            ask = lambda _: server.post("/tokenize", {"content": "hold"})  # noqa: E731
            replies = threads.map(ask, range(text_work._MOST))
            until(lambda: places._value == 0)
            assert held.begun <= text_work._THREADS
            assert server.post("/tokenize", {"content": "hi"}).status_code == 503
            assert server.get("/health").status_code == 200
            chat = {"messages": MESSAGES, "max_tokens": 2}
            assert server.post("/v1/chat/completions", chat).status_code == 200
        finally:
            held.free.set()
        assert [reply.status_code for reply in replies] == [200] * text_work._MOST
    assert server.post("/tokenize", {"content": "hi"}).status_code == 200


def test_who_goes_away_keeps_the_place_of_what_goes_on(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that asks and goes away, again and again, would have as much done as it likes.
    What had not begun is not done."""
    server, held = serving(), Held(monkeypatch)
    places = server.answering.text_work._places
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({"content": "hold"})
    request = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"

    async def go_away() -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write((request + data).encode())
        await asyncio.sleep(0.1)
        writer.transport.abort()

    async def all_of_them() -> None:
        await asyncio.gather(*(go_away() for _ in range(8)))

    try:
        asyncio.run(all_of_them())
        until(lambda: places._value == text_work._MOST - text_work._THREADS)
        assert held.begun == text_work._THREADS
    finally:
        held.free.set()
    until(lambda: places._value == text_work._MOST)
    assert held.begun == text_work._THREADS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "x" * ((1 << 20) + 1)}),
        ("/completion", {"prompt": [5, "x" * ((1 << 20) + 1)]}),
        ("/detokenize", {"tokens": [5] * ((1 << 20) + 1)}),
    ],
)
def test_too_much_at_once(server: Running, path: str, body: dict[str, Any]) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400
    assert "1048576" in reply.json()["error"]["message"]


def test_none_is_taken_in_at_the_end(serving: Callable[..., Running]) -> None:
    server = serving()
    server.answering.stop()
    reply = server.post("/tokenize", {"content": "hi"})
    assert reply.status_code == 503
    assert "stopping" in reply.json()["error"]["message"]
