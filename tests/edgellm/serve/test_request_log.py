"""A line for each request, and nothing of its text."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import LONG, PATH, Running, chat, start
from stepping import asking, held
from waiting import until

from edgellm.serve import answering
from edgellm.serve.http import endpoint, guard

ANSWER = (
    r"tiny: \d+ prompt tokens, \d+ of them cached(?: \([a-z ]+\))?, {} generated, "
    r"\d\.\d{{3}} s to the first, then \d+\.\d/s, length"
)


def until_told(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """So many lines, once they are there."""

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == guard.log.name]

    until(lambda: len(lines()) == count)
    return lines()


@pytest.mark.parametrize("stream", [False, True])
def test_answers(server: Running, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, guard.log.name)
    body = chat("a secret", max_tokens=4, n=2, stream=stream, ignore_eos=True)
    assert server.post(PATH, body).status_code == 200
    (line,) = until_told(caplog, 1)
    answer = ANSWER.format(4)
    assert re.fullmatch(rf"127.0.0.1 POST {PATH} 200 \d+\.\d{{3}} s; {answer}; {answer}", line)


def test_what_is_refused(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, guard.log.name)
    server.get("/health")
    server.post(PATH, {"messages": 3})
    server.get("/v1/models", headers={"Host": "elsewhere.example"})
    server.get("/a%0Ab%20c?key=secret")
    told = until_told(caplog, 3)
    ends = [line.rpartition(" ")[0].rpartition(" ")[0] for line in told]
    assert ends == [
        f"127.0.0.1 POST {PATH} 400",
        "127.0.0.1 GET /v1/models 403",
        "127.0.0.1 GET /a%0Ab%20c 404",
    ]


def test_a_client_that_goes_away(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, guard.log.name)
    with held(server.llm, monkeypatch) as turnstile:
        with asking(server, PATH, [chat("hi", stream=True, **LONG)]):
            (asked,) = turnstile.take_in(1)
        until(lambda: asked.withdrawn)
    (line,) = until_told(caplog, 1)
    told = r"tiny: \d+ prompt tokens, not read to the end"
    assert re.fullmatch(rf"127.0.0.1 POST {PATH} 200 client gone \d+\.\d+ s; {told}", line)


def test_an_answer_that_fails_on_its_way(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status is sent already."""
    caplog.set_level(logging.INFO, guard.log.name)
    monkeypatch.setattr(answering, "deltas", lambda _: 1 / 0)
    body = chat("a secret", max_tokens=4, n=2, stream=True)
    assert server.post(PATH, body).status_code == 200
    (line,) = until_told(caplog, 1)
    end = r"tiny: \d+ prompt tokens, internal"
    assert re.fullmatch(rf"127.0.0.1 POST {PATH} 200 \d+\.\d+ s; {end}; {end}", line)


@dataclass
class App:
    """An application that sends these messages, and fails or is cut off then."""

    messages: Sequence[dict[str, Any]] = ()
    error: BaseException | None = None
    scope: MutableMapping[str, Any] | None = None

    async def __call__(self, scope: MutableMapping[str, Any], _: Any, send: Any) -> None:
        self.scope = scope
        for message in self.messages:
            await send(message)
        if self.error is not None:
            raise self.error


STARTED = [{"type": "http.response.start", "status": 200}]


def ask(app: App) -> None:
    scope: Any = {"type": "http", "method": "M" * 99, "path": "/\udcff\n", "client": None}

    async def ignore(_: Any) -> None:
        pass

    async def nothing() -> Any:
        raise NotImplementedError

    with suppress(type(app.error) if app.error else ZeroDivisionError):
        asyncio.run(guard.RequestLog(app)(scope, nothing, ignore))


@pytest.mark.parametrize(
    ("app", "end"),
    [
        (App(error=OSError()), "- failed"),
        (App(STARTED, OSError()), "200 failed"),
        (App(STARTED, asyncio.CancelledError()), "200 cut off"),
        (App(STARTED), "200 cut off"),
        (App([*STARTED, {"type": "http.response.body"}]), "200"),
        (App([*STARTED, {"type": "http.response.body", "more_body": True}]), "200 cut off"),
    ],
)
def test_ends(app: App, end: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, guard.log.name)
    ask(app)
    (line,) = until_told(caplog, 1)
    assert re.fullmatch(rf"- M{{16}} /%3F%0A {end} \d\.\d{{3}} s", line)


def test_without_a_reader_of_the_log_nothing_is_noted() -> None:
    app = App(STARTED)
    ask(app)
    assert app.scope is not None
    assert endpoint.ANSWERED not in app.scope


@pytest.mark.slow
def test_on_stderr(tiny_model: Path) -> None:
    with start(tiny_model, "--log-requests") as (process, url):
        assert httpx.get(url + "/v1/models", trust_env=False).status_code == 200
        assert process.stderr is not None
        assert "127.0.0.1 GET /v1/models 200 " in next(process.stderr)


def test_why_no_more_was_cached(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("one, two, three and four", "one, two, three and five"):
        caplog.clear()
        caplog.set_level(logging.INFO, guard.log.name)
        server.post(PATH, chat(text, max_tokens=1))
        (line,) = until_told(caplog, 1)
    assert re.search(
        r"\d+ of them cached \(cached prompts differ from there on\), 1 generated", line
    )
