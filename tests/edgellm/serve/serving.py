"""Servers in threads, as clients find them."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from edgellm.llm import LLM
from edgellm.serve import ModelPool, ServedModel, ServeOptions, create_app
from edgellm.serve.answering import Answering
from edgellm.serve.server import Server, _bound

PATH = "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


@dataclass
class Running:
    """A server that runs."""

    url: str
    llm: LLM
    answering: Answering
    server: Server

    @property
    def used_blocks(self) -> int:
        with self.llm.engine.lock, self.llm.engine.cache.change():
            return self.llm.engine.cache.used_blocks

    @property
    def live(self) -> int:
        """Requests in the hands of the loop."""
        return len(self.llm.engine.loop._batcher._live)

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)


@contextmanager
def running(
    pool: ModelPool,
    llm: LLM,
    options: ServeOptions,
    *,
    stopping: Callable[[int], None] | None = None,
) -> Iterator[Running]:
    """Serve in a thread until the block ends."""
    with _bound(options) as listener:
        app = create_app(pool, options)
        started = threading.Event()
        addresses: list[str] = []

        def note(address: str) -> None:
            addresses.append(address)
            started.set()

        server = Server(app, listener, started=note, stopping=stopping)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert started.wait(60)
            yield Running(addresses[0], llm, app.state.answering, server)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def served(llm: LLM, id: str = "tiny") -> ServedModel:
    """A model that is loaded already; unloading it leaves it to others."""
    return ServedModel(id, lambda: LLM(llm.engine))


def until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.002)


def chat(text: str, **options: Any) -> dict[str, Any]:
    """The body of a chat of one message."""
    return {"messages": [{"role": "user", "content": text}], **options}


def words(seed: int, length: int) -> str:
    """A text of so many characters, each a token of the tiny model."""
    return "".join(random.Random(seed).choices("abcdefgh ", k=length))


def wire(path: str, body: Any) -> bytes:
    """A request as it goes over a connection."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@contextmanager
def connected(server: Running, *, room: int = 4096) -> Iterator[socket.socket]:
    """A connection whose client has so much room for what comes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        connection.settimeout(60)
        connection.connect((host, int(port)))
        yield connection


@contextmanager
def start(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`edgellm serve` in a process of its own, and its address; no traceback comes of it."""
    command = [sys.executable, "-m", "edgellm.cli.main", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        try:
            told = next(line for line in process.stderr if line.startswith("serving "))
            yield process, told.split(" at ")[1].split(" ")[0]
        finally:
            process.kill()
        assert "Traceback" not in process.stderr.read()
