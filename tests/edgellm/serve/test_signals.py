"""A server that is told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import LONG, PATH, Running, chat, running, served, start
from waiting import until

from edgellm.llm import LLM
from edgellm.serve import ModelPool, ServeOptions


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end(tiny_model: Path, number: signal.Signals) -> None:
    body = chat("hi", stream=True, max_tokens=300, ignore_eos=True)
    with (
        start(tiny_model, "--grace-s", "20") as (process, url),
        httpx.Client(timeout=60, trust_env=False) as client,
    ):
        with client.stream("POST", url + PATH, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read().splitlines() == [
            "waiting for 1 answer, 20 s at most (Ctrl-C again ends at once)"
        ]
        with pytest.raises(httpx.ConnectError):
            client.get(url + "/health")


@pytest.mark.slow
def test_after_the_grace_time_streams_end_with_an_error(tiny_model: Path) -> None:
    body = {"prompt": "a", "stream": True, "n": 16, **LONG}
    with (
        start(tiny_model, "--grace-s", "0") as (process, url),
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", url + "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "unavailable_error"
        assert process.wait(20) == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tiny_model: Path) -> None:
    body = {"prompt": "a", "stream": True, "n": 16, **LONG}
    with (
        start(tiny_model) as (process, url),
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", url + "/v1/completions", json=body) as stream,
    ):
        next(stream.iter_lines())
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 128 + signal.SIGINT


@pytest.mark.slow
def test_a_socket_for_its_owner(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with start(tiny_model, "--host", str(path)) as (process, address):
        assert address == f"unix:{path}"
        assert os.stat(path).st_mode & 0o077 == 0
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://x/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not path.exists()


@pytest.mark.slow
def test_an_address_that_is_taken(tiny_model: Path) -> None:
    with start(tiny_model) as (_, url):
        port = url.rpartition(":")[2]
        command = [sys.executable, "-m", "edgellm.cli.main", "serve", str(tiny_model)]
        second = subprocess.run(
            [*command, "--port", port], capture_output=True, text=True, timeout=60
        )
    assert second.returncode == 2
    assert "cannot listen" in second.stderr


def test_how_many_answers_are_waited_for(tiny: LLM) -> None:
    """Also those that have no token yet; nothing is said where there are none."""
    told: list[int] = []

    def served_once() -> AbstractContextManager[Running]:
        pool, options = ModelPool([served(tiny)]), ServeOptions(port=0, grace_s=0)
        return running(pool, tiny, options, stopping=told.append)

    with served_once() as server:
        assert server.post(PATH, chat("hi", max_tokens=1)).status_code == 200
    assert told == []
    with ThreadPoolExecutor(20) as threads, served_once() as server:
        bodies = [chat(f"{i} " + "x" * 900, stream=i % 2 > 0, **LONG) for i in range(20)]
        for body in bodies:
            threads.submit(server.post, PATH, body)
        until(lambda: server.answering.on_their_way == 20)
        assert server.answering.metrics.waiting > 0
    assert told == [20]


def last_event(text: str) -> Any:
    """What the last line of a stream says, with `data: ` before it or not."""
    lines = [line for line in text.splitlines() if line and not line.startswith(":")]
    return json.loads(lines[-1].removeprefix("data: "))


def test_streams_of_all_dialects_end_in_their_own_way(serving: Callable[..., Running]) -> None:
    """Beyond the grace time: those in decode, in prefill and in the queue, and what is no stream
    has a status. None of them is cut off."""
    server = serving(grace_s=0.2)
    asked: list[tuple[str, dict[str, Any]]] = [
        (PATH, chat("hi", stream=True, **LONG)),
        ("/v1/completions", {"prompt": "a", "n": 16, "stream": True, **LONG}),
        ("/v1/responses", {"input": "a", "stream": True, "max_output_tokens": 900}),
        ("/v1/messages", chat("hi", stream=True, **LONG)),
        ("/completion", {"prompt": "a", "stream": True, "n_predict": 900, "ignore_eos": True}),
        ("/api/generate", {"prompt": "a", "raw": True, "options": {"num_predict": 900}}),
        (PATH, chat("hi", n=16, **LONG)),
        ("/api/generate", {"prompt": "a", "raw": True, "stream": False}),
    ]
    asked += [(PATH, chat(f"{i} " + "x" * 900, stream=True, **LONG)) for i in range(20)]
    with ThreadPoolExecutor(len(asked)) as threads:
        replies = [threads.submit(server.post, *one) for one in asked]
        state = server.server.server_state
        until(lambda: len(state.tasks) + state.total_requests == len(asked) and server.live > 10)
        server.server.should_exit = True
        done = [reply.result(20) for reply in replies]
    for (path, body), reply in zip(asked, done, strict=True):
        if reply.status_code == 503 or "application/json" in reply.headers["content-type"]:
            assert reply.status_code in (503, 529, 200), path
            continue
        if path == PATH and reply.text.rstrip().endswith("[DONE]"):
            continue  # it was there in time
        event = last_event(reply.text)
        in_time = event.get("done") or event.get("type") == "response.completed"
        assert in_time or "stopping" in json.dumps(event), (path, body, event)
    assert any("stopping" in reply.text for reply in done)
    assert server.live == 0
