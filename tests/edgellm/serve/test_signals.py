"""A server that is told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from inspection import set_costs
from serving import LONG, PATH, Running, chat, running, served, start
from stepping import held
from waiting import CEILING_S, until

from edgellm.llm import LLM, load
from edgellm.serve import ModelPool, ServeOptions

# More than there is room for between the two: it is on its way until its client reads.
UNREAD: dict[str, Any] = {"prompt": "a", "stream": True, "n": 16, **LONG}


def told(process: subprocess.Popen[str]) -> str:
    """The next line on stderr."""
    assert process.stderr is not None
    return next(process.stderr).rstrip()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end(tiny_model: Path, number: signal.Signals) -> None:
    with (
        start(tiny_model, "--grace-s", "600") as (process, url),
        httpx.Client(timeout=CEILING_S, trust_env=False) as client,
    ):
        body = {**UNREAD, "max_tokens": 300}
        with client.stream("POST", url + "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(number)
            assert (
                told(process) == "waiting for 1 answer, 600 s at most (Ctrl-C again ends at once)"
            )
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(CEILING_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        with pytest.raises(httpx.ConnectError):
            client.get(url + "/health")


@pytest.mark.slow
def test_after_the_grace_time_streams_end_with_an_error(tiny_model: Path) -> None:
    with (
        start(tiny_model, "--grace-s", "0") as (process, url),
        httpx.Client(timeout=CEILING_S, trust_env=False) as client,
        client.stream("POST", url + "/v1/completions", json=UNREAD) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert told(process).startswith("waiting for 1 answer")
        rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "unavailable_error"
        assert process.wait(CEILING_S) == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tiny_model: Path) -> None:
    with (
        start(tiny_model) as (process, url),
        httpx.Client(timeout=CEILING_S, trust_env=False) as client,
        client.stream("POST", url + "/v1/completions", json=UNREAD) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        assert told(process).startswith("waiting for 1 answer")
        process.send_signal(signal.SIGINT)
        assert process.wait(CEILING_S) == 128 + signal.SIGINT


@pytest.mark.slow
def test_a_socket_for_its_owner(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with start(tiny_model, "--host", str(path)) as (process, address):
        assert address == f"unix:{path}"
        assert os.stat(path).st_mode & 0o077 == 0
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://x/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(CEILING_S) == 0
    assert not path.exists()


@pytest.mark.slow
def test_an_address_that_is_taken(tiny_model: Path) -> None:
    with start(tiny_model) as (_, url):
        port = url.rpartition(":")[2]
        command = [sys.executable, "-m", "edgellm.cli.main", "serve", str(tiny_model)]
        second = subprocess.run(
            [*command, "--port", port], capture_output=True, text=True, timeout=CEILING_S
        )
    assert second.returncode == 2
    assert "cannot listen" in second.stderr


def test_how_many_answers_are_waited_for(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that have no token yet; nothing is said where there are none."""
    counts: list[int] = []
    llm = load(str(tiny.engine.bundle.path))
    set_costs(llm, 1e-2)  # not all prompts in one step

    def served_once() -> AbstractContextManager[Running]:
        pool, options = ModelPool([served(llm)]), ServeOptions(port=0, grace_s=0)
        return running(pool, llm, options, stopping=counts.append)

    with served_once() as server:
        assert server.post(PATH, chat("hi", max_tokens=1)).status_code == 200
    assert counts == []
    with (
        ThreadPoolExecutor(20) as threads,
        served_once() as server,
        held(llm, monkeypatch) as turnstile,
    ):
        for i in range(20):
            threads.submit(server.post, PATH, chat(f"{i} hi", stream=i % 2 > 0, **LONG))
        until(lambda: len(turnstile.submitted) == 20)
        turnstile.step()
        assert server.answering.metrics.waiting > 0
        server.server.should_exit = True
        until(lambda: bool(counts))
    assert counts == [20]


def last_event(text: str) -> Any:
    """What the last line of a stream says, with `data: ` before it or not."""
    lines = [line for line in text.splitlines() if line and not line.startswith(":")]
    return json.loads(lines[-1].removeprefix("data: "))


def test_streams_of_all_dialects_end_in_their_own_way(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the grace time: those in decode, in prefill and in the queue, and what is no stream
    has a status. None of them is cut off."""
    server = serving(grace_s=0)
    early: list[tuple[str, dict[str, Any]]] = [
        (PATH, chat("hi", stream=True, **LONG)),
        ("/v1/completions", {"prompt": "a", "n": 16, "stream": True, **LONG}),
        ("/v1/responses", {"input": "a", "stream": True, "max_output_tokens": 900}),
        ("/v1/messages", chat("hi", stream=True, **LONG)),
        ("/completion", {"prompt": "a", "stream": True, "n_predict": 900, "ignore_eos": True}),
        ("/api/generate", {"prompt": "a", "raw": True, "options": {"num_predict": 900}}),
        (PATH, chat("hi", n=16, **LONG)),
        ("/api/generate", {"prompt": "a", "raw": True, "stream": False}),
    ]
    late = [(PATH, chat(f"{i} " + "x" * 900, stream=True, **LONG)) for i in range(20)]
    with ThreadPoolExecutor(len(early) + len(late)) as threads:
        with held(server.llm, monkeypatch) as turnstile:
            replies = [threads.submit(server.post, *one) for one in early]
            turnstile.take_in(len(early))
            turnstile.step()  # with which the other samples come
            replies += [threads.submit(server.post, *one) for one in late]
            turnstile.take_in(len(late))
            assert set(turnstile.places()) == {"answer", "prompt", "queue"}
            server.server.should_exit = True
            until(lambda: server.answering.stopping)
        done = [reply.result() for reply in replies]
    for (path, body), reply in zip(early + late, done, strict=True):
        assert "stopping" in reply.text, (path, body, reply.text[-300:])
        if "application/json" in reply.headers["content-type"]:
            assert reply.status_code == 503, path
        else:
            assert reply.status_code == 200
            assert "stopping" in json.dumps(last_event(reply.text))
    until(lambda: server.idle)
