"""The way of a request through the front to a replica and back, without Ray."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from serving import served
from stepping import held
from waiting import CEILING_S, until

from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.ray.forwarding import ForwardedRequest, Message, answered, front_app
from edgellm.serve import ModelPool, ServeOptions, create_app

T = TypeVar("T")
TEXTS = {"prompt": "once upon a time " * 40, "max_tokens": 6, "seed": 1}


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    return load(str(tiny_model), ctx_size=8 * BLOCK, cache_size=16 * BLOCK)


class Application:
    """A front and one replica; what was handed on."""

    def __init__(self, llm: LLM, options: ServeOptions) -> None:
        self.llm = llm
        self.handed_on: list[ForwardedRequest] = []
        pool = ModelPool([served(llm)])
        self._replica = create_app(pool, options)
        self._front = front_app(self._answer, options)

    async def _answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        request = pickle.loads(pickle.dumps(request))
        self.handed_on.append(request)
        async for messages in answered(self._replica, request):  # type: ignore[arg-type]
            yield messages

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        *,
        gone: asyncio.Event | None = None,
    ) -> list[Message]:
        """The ASGI messages of the answer; the client goes with the event."""
        sent: list[Message] = []
        gone = gone or asyncio.Event()
        parts = [body[:7], body[7:]]

        async def receive() -> Message:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        pairs = {"host": "localhost", **headers}.items()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in pairs],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "not to be sent": lambda: None,
        }
        await self._front(scope, receive, send)  # type: ignore[arg-type]
        return sent


@pytest.fixture
def start(tiny: LLM) -> Callable[..., Application]:
    def run(**options: Any) -> Application:
        return Application(tiny, ServeOptions(**options))

    return run


def call(
    application: Application, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    sent = finished(application.ask(method, path, b"" if body is None else data, headers))
    start, *rest = sent
    names = {k.decode(): v.decode() for k, v in start["headers"]}
    return start["status"], names, b"".join(part.get("body", b"") for part in rest)


def finished(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(CEILING_S):
            return await work

    return asyncio.run(limited())


def test_an_answer_is_the_replica_s(start: Callable[..., Application], tiny: LLM) -> None:
    application = start()
    status, headers, body = call(application, "/v1/completions", TEXTS)
    assert status == 200
    assert headers["content-type"] == "application/json"
    alone = tiny.generate(str(TEXTS["prompt"]), max_tokens=6, seed=1)
    assert json.loads(body)["choices"][0]["text"] == alone.text
    (request,) = application.handed_on
    assert len(request.prefix) == 1
    assert "not to be sent" not in request.scope


def test_a_stream_comes_as_it_is(start: Callable[..., Application], tiny: LLM) -> None:
    status, headers, body = call(start(), "/v1/completions", {**TEXTS, "stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert body.endswith(b"data: [DONE]\n\n")
    lines = [line for line in body.splitlines() if line.startswith(b"data: {")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == tiny.generate(str(TEXTS["prompt"]), max_tokens=6, seed=1).text


def test_messages_that_come_while_others_are_taken_are_not_lost() -> None:
    """The reader may wait for something before it asks for the next ones."""
    taken, said = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "first"})
        await taken.wait()
        for name in ("middle", "last"):
            await send({"type": name})
        said.set()

    async def read() -> list[str]:
        types = []
        async for messages in answered(app, ForwardedRequest({}, b"", [])):
            types += [message["type"] for message in messages]
            taken.set()
            await said.wait()
        return types

    assert finished(read()) == ["first", "middle", "last"]


def test_what_is_wrong_is_said_in_the_dialect(start: Callable[..., Application]) -> None:
    application = start(max_body_bytes=2000)
    for path, body, status in (
        ("/v1/chat/completions", b"{", 400),
        ("/v1/completions", b'{"prompt": ["' + b"[" * 90, 400),
        ("/v1/completions", b"x" * 2001, 413),
        ("/api/nothing", None, 404),
        ("/v1/messages", b"{}", 400),
    ):
        got, _, answer = call(application, path, body)
        assert got == status, answer
        assert json.loads(answer)["error"]


def test_the_front_lets_nobody_in_who_may_not(start: Callable[..., Application]) -> None:
    application = start(api_keys=("a", "b"))
    assert call(application, "/v1/completions", TEXTS)[0] == 401
    assert call(application, "/v1/completions", TEXTS, host="evil.example")[0] == 403
    assert call(application, "/v1/completions", TEXTS, origin="https://evil.example")[0] == 403
    assert application.handed_on == []
    assert call(application, "/health")[0] == 200
    prefixes = []
    for key in "ab":
        assert call(application, "/v1/completions", TEXTS, authorization=f"Bearer {key}")[0] == 200
        prefixes.append(application.handed_on[-1].prefix)
    assert prefixes[0] != prefixes[1]


def test_who_goes_is_not_answered(
    start: Callable[..., Application], tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are back after one step."""
    application = start()
    endless = {**TEXTS, "stream": True, "max_tokens": 800, "ignore_eos": True}

    async def leave() -> None:
        body, gone = json.dumps(endless).encode(), asyncio.Event()
        with held(tiny, monkeypatch) as turnstile:
            asked = asyncio.create_task(
                application.ask("POST", "/v1/completions", body, {}, gone=gone)
            )
            (request,) = await asyncio.to_thread(turnstile.take_in, 1)
            while turnstile.places() != ["answer"]:
                await asyncio.to_thread(turnstile.step)
                await asyncio.to_thread(until, lambda: turnstile.waits)
            assert tiny.engine.cache.used_blocks > 0
            gone.set()
            await asyncio.to_thread(until, lambda: request.withdrawn)
            assert await asyncio.to_thread(turnstile.step) == (0, 0)
            assert len(await asked) < 100

    finished(leave())


def test_a_replica_that_fails(start: Callable[..., Application]) -> None:
    application = start()

    async def fail(request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        raise ValueError("a secret")
        yield []

    failing = front_app(fail, ServeOptions())
    application._front = failing
    status, _, body = call(application, "/v1/completions", TEXTS)
    assert status == 500
    assert b"secret" not in body


def test_an_application_that_raises_raises_behind_what_it_said() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"asked"
        await send({"type": "one"})
        await send({"type": "two"})
        await asyncio.sleep(0)
        await send({"type": "three"})
        raise ValueError("broken")

    types = []

    async def read() -> None:
        async for messages in answered(app, ForwardedRequest({}, b"asked", [])):
            types.extend(message["type"] for message in messages)
            await asyncio.sleep(0)  # the application goes on while they are taken

    with pytest.raises(ValueError, match="broken"):
        finished(read())
    assert types == ["one", "two", "three"]
