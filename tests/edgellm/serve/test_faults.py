"""Clients that go away or come all at once, and answers that fail."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from serving import LONG, PATH, Running, chat, until, wire, words

from edgellm.kernels.kv_blocks import BLOCK


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def test_thirty_together_are_as_alone(server: Running) -> None:
    """Chats, texts and embeddings, with prompts of all lengths: the same bits."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for i in range(30):
        text = words(i % 23, (5, 60, 130, 300, 513, 40)[i % 6] + i)
        options = {"max_tokens": 4 + 5 * (i % 7), "seed": i, "temperature": 0.8 * (i % 2)}
        if i % 5 == 4:
            asked.append(("/v1/embeddings", {"input": text}))
        elif i % 5 == 3:
            asked.append(("/v1/completions", {"prompt": text, "n": 2, "logprobs": 1, **options}))
        else:
            asked.append((PATH, chat(text, logprobs=True, **options)))

    def answer(one: tuple[str, dict[str, Any]]) -> Any:
        reply = server.post(*one)
        assert reply.status_code == 200, reply.text
        values = reply.json()
        return values.get("choices") or values["data"]

    alone = [answer(one) for one in asked]
    with ThreadPoolExecutor(30) as threads:
        assert list(threads.map(answer, asked)) == alone


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_go_away(server: Running, seed: int) -> None:
    """At once, in the queue, in prefill, in decode, in the middle of a body; streams and not."""
    chance = random.Random(seed)

    async def one() -> None:
        reader, writer = await connect(server)
        text = words(chance.randrange(9), chance.choice((5, 300, 900)))
        n = chance.choice((1, 1, 3))
        data = wire(PATH, chat(text, stream=chance.random() < 0.6, n=n, **LONG))
        if chance.random() < 0.1:
            data = data[: chance.randrange(len(data))]
        writer.write(data)
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.3)
        elif chance.random() < 0.8:
            await asyncio.wait([asyncio.ensure_future(reader.read(300))], timeout=1)
        if chance.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(40)))

    asyncio.run(all_of_them())
    until(lambda: server.live == 0 and server.used_blocks == 0)
    metrics = server.answering.metrics
    until(lambda: metrics.waiting == metrics.running == 0)
    assert server.post(PATH, chat("hi", max_tokens=1)).status_code == 200


def test_blocks_are_back_within_a_step(server: Running) -> None:
    with (
        server.client() as client,
        client.stream("POST", PATH, json=chat("hi", stream=True, **LONG)) as s,
    ):
        lines = s.iter_lines()
        for _ in range(9):
            next(lines)
        assert server.live == 1
        counts = server.llm.engine.loop.counts
        s.close()
        gone_at = counts.steps
        until(lambda: server.live == 0)
    # what is sent until the kernel says that the client has gone is little
    assert counts.steps - gone_at < 60
    assert server.used_blocks == 0


@pytest.mark.slow
def test_a_thousand_clients_that_go_away_leave_nothing(server: Running) -> None:
    def some(count: int, seed: int) -> None:
        chance = random.Random(seed)

        async def one() -> None:
            _, writer = await connect(server)
            text = words(chance.randrange(30), chance.choice((5, 300, 900)))
            writer.write(wire(PATH, chat(text, stream=chance.random() < 0.6, **LONG)))
            await asyncio.sleep(chance.random() * 0.2)
            writer.transport.abort()

        async def all_of_them() -> None:
            for _ in range(count // 25):
                await asyncio.gather(*(one() for _ in range(25)))

        asyncio.run(all_of_them())
        until(lambda: server.live == server.used_blocks == server.connections == 0)

    process = psutil.Process()
    some(200, 0)
    memory, files, threads = process.memory_info().rss, process.num_fds(), threading.active_count()
    some(800, 1)
    assert process.memory_info().rss < memory + (24 << 20)
    assert process.num_fds() <= files + 5
    assert threading.active_count() <= threads + 3


def test_two_hundred_at_once(serving: Callable[..., Running]) -> None:
    """Some are answered, the others told to come again; nobody hangs, and nobody gets a 500."""
    server = serving(max_waiting=20)

    async def ask(i: int) -> tuple[int, str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:
            body = chat(words(i, 100), max_tokens=3)
            reply = await client.post(server.url + PATH, json=body)
            if reply.status_code == 503:
                assert 1 <= int(reply.headers["retry-after"]) <= 60
                assert reply.json()["error"]["type"] == "overloaded_error"
            return reply.status_code, reply.text

    async def all_of_them() -> list[tuple[int, str]]:
        return await asyncio.gather(*(ask(i) for i in range(200)))

    replies = asyncio.run(all_of_them())
    statuses = {status for status, _ in replies}
    assert statuses <= {200, 503}
    assert sum(status == 200 for status, _ in replies) >= 20
    refused = sum(status == 503 for status, _ in replies)
    assert refused == server.answering.metrics.rejected["requests"]
    assert server.post(PATH, chat("hi", max_tokens=1)).status_code == 200


def test_the_queue_is_limited_in_tokens(serving: Callable[..., Running]) -> None:
    server = serving(max_waiting_tokens=1500)

    def ask(i: int) -> int:
        return server.post(PATH, chat(words(i, 900), max_tokens=1)).status_code

    with ThreadPoolExecutor(12) as threads:
        statuses = list(threads.map(ask, range(12)))
    assert set(statuses) == {200, 503}
    assert server.answering.metrics.rejected["tokens"] == statuses.count(503)
    assert ask(99) == 200


def test_time_limits_count_from_the_arrival(server: Running) -> None:
    begin = time.monotonic()
    reply = server.post(PATH, chat("hi", time_limit_ms=200, **LONG)).json()
    assert time.monotonic() - begin < 3
    assert reply["choices"][0]["finish_reason"] == "length"
    assert 0 < reply["usage"]["completion_tokens"] < 900


def test_limits_of_the_server(serving: Callable[..., Running]) -> None:
    server = serving(max_tokens=5, time_limit_ms=30_000, max_n=2)
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
    from edgellm.engine.answer import Answer

    draw = Answer.draw

    def failing(self: Answer, logits: Any, tokens: Any) -> int:
        if 77 in self._options.logit_bias:
            raise RuntimeError("/secret/path")
        return draw(self, logits, tokens)

    monkeypatch.setattr(Answer, "draw", failing)
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(server.post, PATH, chat("hi", max_tokens=40, ignore_eos=True))
        bad = server.post(PATH, chat("hi", logit_bias={"77": 1}))
        with server.client() as client:
            stream = client.post(PATH, json=chat("hi", logit_bias={"77": 1}, stream=True))
    assert bad.status_code == 500
    assert "secret" not in bad.text + stream.text
    last = stream.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert good.result().json()["usage"]["completion_tokens"] == 40


def test_heartbeats_and_progress_are_comments(serving: Callable[..., Running]) -> None:
    server = serving(heartbeat_s=0.05)
    with ThreadPoolExecutor(6) as threads:
        others = [threads.submit(server.post, PATH, chat(words(i, 900), **LONG)) for i in range(4)]
        text = server.post(PATH, chat(words(9, 900), stream=True, max_tokens=9)).text
        for other in others:
            other.result()
    comments = [line for line in text.splitlines() if line.startswith(":")]
    assert any(line.startswith(": prompt ") for line in comments)
    rest = [line for line in text.splitlines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in rest)
