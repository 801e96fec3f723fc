"""A loop whose steps begin when a test lets them, and clients that go away."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import inspection
import pytest
from serving import Running, connected, wire
from waiting import until

from edgellm.engine.request import Request
from edgellm.llm import LLM

Place = Literal["queue", "prompt", "answer"]


class Turnstile:
    """Holds each step of a model up until it is let through.

    Attributes:
        waits: whether a step is about to begin; no request changes meanwhile.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = False
        self._llm = llm
        self._steps, self._left = 0, (0, 0)
        self._tickets = threading.Semaphore(0)
        self._open = False
        inspection.watch_steps(llm, monkeypatch, self._held)

    def _held(self, step: Callable[[], None]) -> None:
        if not self._open:
            self.waits = True
            self._tickets.acquire()
        step()
        self._left = len(self.requests), self._llm.engine.cache.used_blocks
        self._steps += 1

    def let(self) -> None:
        """Let a step begin; its end is not waited for."""
        until(lambda: self.waits)
        self.waits = False
        self._tickets.release()

    def step(self) -> tuple[int, int]:
        """Let a step through: requests that are left after it, and the blocks that they hold."""
        until(lambda: self.waits)
        count = self._steps
        self.let()
        until(lambda: self._steps > count)
        return self._left

    def step_until(self, condition: Callable[[], bool], *, most: int = 200) -> None:
        """Let steps through until a condition holds between two of them."""
        until(lambda: self.waits)
        while not condition():
            assert most > 0, "it did not come to be"
            most -= 1
            self.step()
            until(lambda: self.waits)

    @property
    def submitted(self) -> list[Request]:
        """Requests that the next step takes in."""
        return inspection.submitted(self._llm)

    def take_in(self, count: int) -> list[Request]:
        """The newest requests, of so many clients, after the first step that knows of them."""
        until(lambda: len(self.submitted) == count)
        self.step()
        until(lambda: self.waits)
        return self.requests[-count:]

    def open(self) -> None:
        """Hold no step up any more."""
        self._open = True
        self._tickets.release()

    @property
    def requests(self) -> list[Request]:
        """Those in the hands of the loop, in the order in which they came."""
        return inspection.live(self._llm)

    def places(self) -> list[Place]:
        """Where each of them is, between two steps."""
        return [self._place(request) for request in self.requests]

    def _place(self, request: Request) -> Place:
        if request in inspection.waiting(self._llm):
            return "queue"
        return "answer" if request.decoding else "prompt"


@contextmanager
def held(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turnstile]:
    """No step of a model begins within the block but those that are let through."""
    turnstile = Turnstile(llm, monkeypatch)
    try:
        yield turnstile
    finally:
        turnstile.open()


@contextmanager
def asking(server: Running, path: str, bodies: Sequence[Any]) -> Iterator[None]:
    """Clients that go away with the end of the block; every other one without a farewell."""
    reset = struct.pack("ii", 1, 0)
    with ExitStack() as stack:
        for number, body in enumerate(bodies):
            client = stack.enter_context(connected(server, room=1 << 17))
            client.sendall(wire(path, body))
            if number % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        yield


def blocks_of(request: Request) -> int:
    """Blocks that a request holds."""
    held = request.context.sequence if request.job is None else request.job.growth
    return sum(len(list(table.held)) for table in held.tables)
