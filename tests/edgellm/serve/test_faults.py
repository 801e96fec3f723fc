"""Clients that go away or come all at once, and answers that fail."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import inspection
import pytest
from calling import Dictated
from remains import remains, until_remains
from serving import LONG, PATH, Running, chat, wire, words
from stepping import held
from waiting import Clock, until

from edgellm import LLM
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.serve.ask import answerable_prompt


@pytest.mark.slow
def test_clients_that_go_away_at_random(server: Running) -> None:
    """In the middle of a body, in the queue, in prefill or in decode; streams and not."""

    def some(count: int, seed: int) -> None:
        chance = random.Random(seed)

        async def one() -> None:
            host, port = server.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            text = words(chance.randrange(30), chance.choice((5, 300, 900)))
            n = chance.choice((1, 1, 3))
            data = wire(PATH, chat(text, stream=chance.random() < 0.6, n=n, **LONG))
            writer.write(data[: chance.choice((len(data), len(data), chance.randrange(len(data))))])
            for _ in range(chance.choice((0, 0, 1, 10, 100))):
                await asyncio.sleep(0)
            writer.transport.abort() if chance.random() < 0.5 else writer.close()

        async def all_of_them() -> None:
            for _ in range(count // 25):
                await asyncio.gather(*(one() for _ in range(25)))

        asyncio.run(all_of_them())
        # connections are accepted in the order in which they were made: the others' are, by now
        assert server.get("/health").status_code == 200
        until(lambda: server.deserted)
        assert server.post(PATH, chat("hi", max_tokens=1)).status_code == 200
        until(lambda: server.deserted)

    some(200, 0)
    before = remains()
    some(800, 1)
    until_remains(before)


def test_eighty_at_once(serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that may wait are answered, the others told to come again; no request hangs."""
    server = serving(max_waiting=20)
    rejected = server.answering.metrics.rejected

    async def ask(client: httpx.AsyncClient, i: int) -> int:
        reply = await client.post(PATH, json=chat(words(i, 100), max_tokens=3))
        if reply.status_code == 503:
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert reply.json()["error"]["type"] == "overloaded_error"
        return reply.status_code

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        common: Any = {"timeout": None, "trust_env": False, "limits": limits}
        async with httpx.AsyncClient(base_url=server.url, **common) as client:
            with held(server.llm, monkeypatch):
                asked = [asyncio.create_task(ask(client, i)) for i in range(80)]
                await asyncio.to_thread(until, lambda: rejected["requests"] == 60)
            return await asyncio.gather(*asked)

    statuses = asyncio.run(all_of_them())
    assert sorted(statuses) == [200] * 20 + [503] * 60
    assert server.post(PATH, chat("hi", max_tokens=1)).status_code == 200


def test_the_queue_is_limited_in_tokens(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving(max_waiting_tokens=1500)
    rejected = server.answering.metrics.rejected

    def ask(i: int) -> int:
        return server.post(PATH, chat(words(i, 900), max_tokens=1)).status_code

    with ThreadPoolExecutor(12) as threads:
        with held(server.llm, monkeypatch):
            asked = [threads.submit(ask, i) for i in range(12)]
            until(lambda: rejected["tokens"] == 11)
        assert sorted(each.result() for each in asked) == [200] + [503] * 11
    assert ask(99) == 200


def test_time_limits_count_from_the_arrival(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of the time pass before its prompt is read, the rest in four steps."""
    clock = Clock()
    for module in (
        "serve.queue_limits",
        "serve.answering",
        "engine.answer",
        "engine.request",
    ):
        monkeypatch.setattr(f"edgellm.{module}.time", clock)

    def slowly(*arguments: Any) -> Any:
        clock.advance(3 / 16)
        return answerable_prompt(*arguments)

    def slow(step: Callable[[], None]) -> None:
        clock.advance(1 / 64)
        step()

    monkeypatch.setattr("edgellm.serve.answering.answerable_prompt", slowly)
    inspection.watch_steps(server.llm, monkeypatch, slow)
    reply = server.post(PATH, chat("hi", time_limit_ms=250, **LONG)).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 4


def test_limits_of_the_server(serving: Callable[..., Running]) -> None:
    server = serving(max_tokens=5, time_limit_ms=3_600_000, max_n=2)
    for asked in (None, 3, 90):
        body = chat("hi", max_tokens=asked, ignore_eos=True)
        counts = server.post(PATH, body).json()["usage"]
        assert counts["completion_tokens"] == min(asked or 5, 5)
    assert server.post(PATH, chat("hi", n=3)).status_code == 400


def test_a_prompt_of_a_whole_context_in_a_crowd(server: Running) -> None:
    """More than fit into the pool together: they take turns."""
    most = server.llm.ctx_size - 1
    assert most > 7 * BLOCK

    def ask(i: int) -> int:
        return server.post(PATH, chat(words(i, most - 1), max_tokens=2)).status_code

    with ThreadPoolExecutor(12) as threads:
        assert set(threads.map(ask, range(12))) == {200}


@pytest.mark.slow
def test_a_request_larger_than_the_pool(server: Running) -> None:
    """Its answers take turns, and each is the one that its seed gives alone."""
    metrics, n = server.answering.metrics, 10
    assert n * (900 // BLOCK + 1) > 64
    before = metrics.preempted
    body = {"prompt": words(3, 60), "seed": 5, "logprobs": 1, **LONG}
    many = server.post("/v1/completions", {**body, "n": n}).json()["choices"]
    assert metrics.preempted > before
    for i in (0, n - 1):
        (alone,) = server.post("/v1/completions", {**body, "seed": 5 + i}).json()["choices"]
        assert {**many[i], "index": 0} == alone


def test_one_that_fails_ends_no_other(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Dictated(server.llm, "well begun", fails=True)
    monkeypatch.setattr(LLM, "grammar_filter", lambda *_: failing)
    wrong = {"response_format": {"type": "json_object"}}
    asked = [
        chat("hi", max_tokens=40, ignore_eos=True),
        chat("hi", **wrong),
        chat("hi", stream=True, **wrong),
    ]
    with ThreadPoolExecutor(3) as threads:
        with inspection.all_submitted(server.llm, 3):
            replies = [threads.submit(server.post, PATH, body) for body in asked]
        good, bad, stream = inspection.results(replies)
    assert bad.status_code == 500
    assert "secret" not in bad.text + stream.text
    last = stream.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert good.json()["usage"]["completion_tokens"] == 40


def test_heartbeats_and_progress_are_comments(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving(heartbeat_s=0.05)
    body = chat(words(9, 900), stream=True, max_tokens=9)
    with (
        server.client() as client,
        held(server.llm, monkeypatch) as turnstile,
        client.stream("POST", PATH, json=body) as stream,
    ):
        lines = (line for line in stream.iter_lines() if line)
        assert next(lines) == ": keep-alive"
        turnstile.step()
        assert next(line for line in lines if line != ": keep-alive").startswith(": prompt ")
        turnstile.open()
        rest = [line for line in lines if not line.startswith(":")]
    assert rest[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in rest)


def test_heartbeats_of_anthropics_streams_are_events(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claude Code leaves a stream that has comments alone; the message is the same with them."""
    server = serving(heartbeat_s=0.05)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": words(9, 900)}]}
    body = {**ask, "max_tokens": 9, "temperature": 0, "stream": True}
    with (
        server.client() as client,
        held(server.llm, monkeypatch) as turnstile,
        client.stream("POST", "/v1/messages", json=body) as stream,
    ):
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if "data: " in line)
        events = (json.loads(line) for line in lines)
        assert [next(events)["type"], next(events)["type"]] == ["message_start", "ping"]
        for _ in range(2):
            beat = next(events)
            assert (beat["type"], beat["delta"]["stop_reason"]) == ("message_delta", None)
        turnstile.open()
        rest = [
            event for event in events if event["type"] != "message_delta" or event.get("timings")
        ]
    assert rest[-1]["type"] == "message_stop"
    assert rest[-2]["delta"]["stop_reason"] == "max_tokens"
    whole = server.post("/v1/messages", {**body, "stream": False}).json()
    text = "".join(e["delta"]["text"] for e in rest if e["type"] == "content_block_delta")
    assert [block["text"] for block in whole["content"]] == [text]
