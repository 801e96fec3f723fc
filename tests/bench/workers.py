"""Runtimes in processes of their own: loaded once, asked in JSON lines, asleep while others run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Message = dict[str, Any]


class Worker:
    """A process that serves one runtime, seen from here."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """Start it and wait until the runtime is loaded.

        Raises:
            RuntimeError: it ended before.
        """
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.loaded = self._read()

    def ask(self, question: Message) -> Message:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> Message:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended")
        answer: Message = json.loads(line)
        return answer


WorkerT = TypeVar("WorkerT", bound=Worker)


@contextmanager
def started(names: Sequence[str], start: Callable[[str], WorkerT]) -> Iterator[list[WorkerT]]:
    """A worker for each runtime that works here; the others are named."""
    workers: list[WorkerT] = []
    try:
        for name in names:
            try:
                workers.append(start(name))
            except RuntimeError:
                print(f"{name}: not installed, or it does not take this; left out", flush=True)
        yield workers
    finally:
        for worker in workers:
            worker.close()


def serve(load: Callable[[], tuple[Callable[[Message], Message], Message]]) -> None:
    """The worker's side: load, say so, then answer questions until there are no more.

    Args:
        load: gives what answers a question, and the first message.
    """
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints does not get between the answers

    def send(values: Message) -> None:
        print(json.dumps(values), file=stream, flush=True)

    answer, loaded = load()
    send(loaded)
    for line in sys.stdin:
        send(answer(json.loads(line)))
