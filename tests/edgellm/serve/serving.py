"""Servers in threads, as clients find them."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import httpx
import inspection
from waiting import CEILING_S

from edgellm.generation_options import GenerationArguments, GenerationOptions
from edgellm.llm import LLM
from edgellm.serve import ModelPool, ServedModel, ServeOptions, create_app, queue_limits
from edgellm.serve.answering import Answering
from edgellm.serve.queue_limits import QueueLimits
from edgellm.serve.server import Server, _bound

PATH = "/v1/chat/completions"
MOST_TEXTS, TEXT_THREADS = queue_limits._MOST, queue_limits._THREADS
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
        """Waits for the end of a step: not for tests that hold one up."""
        return inspection.used_blocks(self.llm)

    @property
    def live(self) -> int:
        """Requests in the hands of the loop."""
        return len(inspection.live(self.llm))

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def arrived(self) -> int:
        """Requests whose headers have come since the server was started; never too few."""
        state = self.server.server_state
        return len(state.tasks) + state.total_requests

    @property
    def limits(self) -> QueueLimits:
        """The queue of those that are not answered yet."""
        return self.answering._limits

    @property
    def free_text_places(self) -> int:
        """How many more texts may be at work or wait."""
        return self.answering.text_work._places._value

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way, and nothing of it is left."""
        return self.answering.on_their_way == self.live == self.used_blocks == 0

    @property
    def deserted(self) -> bool:
        """Whether it is idle and has no connection."""
        return self.connections == 0 and self.idle

    def client(self, **options: Any) -> httpx.Client:
        # certificates, which take 20 ms to read, are not for http
        common: Any = {"timeout": CEILING_S, "trust_env": False, "verify": False}
        return httpx.Client(base_url=self.url, **common, **options)

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
            assert started.wait(CEILING_S)
            yield Running(addresses[0], llm, app.state.answering, server)
        finally:
            server.should_exit = True
            thread.join(CEILING_S)
            assert not thread.is_alive()


class SeededLLM(LLM):
    """A model whose answers have a seed where a request has none."""

    def generation_options(self, **arguments: Unpack[GenerationArguments]) -> GenerationOptions:
        seeded: GenerationArguments = {"seed": 1, **arguments}
        return super().generation_options(**seeded)


def served(llm: LLM, id: str = "tiny") -> ServedModel:
    """A model that is loaded already, whose answers are the same in every run; unloading it leaves
    it to others."""
    return ServedModel(id, lambda: SeededLLM(llm.engine))


@contextmanager
def no_text_places(server: Running) -> Iterator[None]:
    """As many texts are at work or wait as may."""
    places = server.answering.text_work._places
    for _ in range(MOST_TEXTS):
        assert places.acquire(blocking=False)
    try:
        yield
    finally:
        places.release(MOST_TEXTS)


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
        connection.settimeout(CEILING_S)
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
