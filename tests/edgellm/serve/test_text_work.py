"""Texts that are counted, split and put together: little at a time, beside answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import MOST_TEXTS, TEXT_THREADS, Running, no_text_places
from stepping import asking
from waiting import CEILING_S, until

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
def test_too_many_at_once(server: Running, path: str, body: dict[str, Any], kind: str) -> None:
    assert server.post(path, body).status_code == 200
    rejected = server.answering.metrics.rejected["texts"]
    with no_text_places(server):
        reply = server.post(path, body)
    assert reply.status_code in (503, 529)
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == kind
    assert server.answering.metrics.rejected["texts"] == rejected + 1


class Held:
    """Texts that a tokenizer does not come to the end of before it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.begun: list[str] = []
        encode = Tokenizer.encode

        def held(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
            if text == "hold":
                self.begun.append(text)
                assert self.free.wait(CEILING_S)
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(Tokenizer, "encode", held)


def test_those_who_wait_do_not_hold_up_others(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers begin, and the event loop goes on, while all that may be is at work on texts."""
    server, held = serving(), Held(monkeypatch)
    with ThreadPoolExecutor(MOST_TEXTS) as threads:
        try:
            ask = lambda _: server.post("/tokenize", {"content": "hold"})  # noqa: E731
            replies = threads.map(ask, range(MOST_TEXTS))
            until(lambda: server.free_text_places == 0)
            assert len(held.begun) <= TEXT_THREADS
            assert server.post("/tokenize", {"content": "hi"}).status_code == 503
            assert server.get("/health").status_code == 200
            chat = {"messages": MESSAGES, "max_tokens": 2}
            assert server.post("/v1/chat/completions", chat).status_code == 200
        finally:
            held.free.set()
        assert [reply.status_code for reply in replies] == [200] * MOST_TEXTS
    assert server.post("/tokenize", {"content": "hi"}).status_code == 200


def test_who_goes_away_keeps_the_place_of_what_goes_on(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that asks and goes away, again and again, would have as much done as it likes.
    What had not begun is not done."""
    server, held = serving(), Held(monkeypatch)

    def all_have_places() -> bool:
        places = MOST_TEXTS - server.free_text_places
        return (places, len(held.begun)) == (8, TEXT_THREADS)

    try:
        with asking(server, "/tokenize", [{"content": "hold"}] * 8):
            until(all_have_places)
        until(lambda: server.free_text_places == MOST_TEXTS - TEXT_THREADS)
        assert len(held.begun) == TEXT_THREADS
    finally:
        held.free.set()
    until(lambda: server.free_text_places == MOST_TEXTS)
    assert len(held.begun) == TEXT_THREADS


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
