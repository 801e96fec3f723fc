"""The engine's thread, which alone changes the KV cache and computes steps.

Python handles signals in the main thread, so Ctrl-C never strikes the engine. Other threads send
commands, which run between two steps.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Protocol, TypeVar

from edgellm.errors import EdgeLLMError, OptionError

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Seconds between two looks at whether the engine's thread lives, and on Windows for Ctrl-C.
_PATIENCE_S = 0.1

Command = Callable[[], None]


class Worker(Protocol):
    """Work of the engine's thread besides commands; all is called there."""

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""

    @property
    def away(self) -> bool:
        """Whether other threads work for it, so that it cannot go on in a forked process."""

    def step(self) -> None: ...

    def pause(self) -> None:
        """Do what a step leaves to the next one, as something else comes before that."""

    def fail(self, error: BaseException) -> None:
        """End all work, as a command or a step has left it half done."""


class _Body:
    """The body of a thread, which has no reference to the engine while it waits.

    Attributes:
        commands: commands to run, first to last.
        pokes: an item for each change since the thread last looked.
        worker: maker of steps.
        busy: whether the thread is in the middle of a command or a step.
        stopped: whether the thread is to end.
        ended: whether it has ended. `Thread.is_alive` would say so, but an interrupt in it has a
            thread called dead that runs (CPython 3.11).
    """

    def __init__(self) -> None:
        self.commands: deque[Command] = deque()
        self.pokes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.worker: weakref.ref[Worker] | None = None
        self.busy = False
        self.stopped = self.ended = False

    def run(self) -> None:
        """Work until `stopped`, and end what has begun."""
        try:
            while not self.stopped:
                self.pokes.get()
                self.busy = True
                self._work()
                self.busy = False
            while self.commands:  # answers that were left give their blocks to the cache on disk
                self._command()
            while (worker := self._worker()) is not None and worker.away:
                self.pokes.get()
        finally:
            self.ended = True

    def _work(self) -> None:
        """Run commands and, while there are none, steps, until nothing is left to do."""
        while not self.stopped:
            while not self.pokes.empty():  # before the look at what there is to do
                self.pokes.get()
            worker = self._worker()
            if not self.commands and worker is not None and worker.has_work:
                worker.step()
                continue
            if worker is not None:
                worker.pause()
            if not self.commands:
                return
            self._command()
        if (worker := self._worker()) is not None:
            worker.pause()

    def _command(self) -> None:
        try:
            self.commands.popleft()()
        except BaseException as error:
            _log.error("a command of the engine failed", exc_info=error)
            worker = self._worker()
            if worker is not None:
                worker.fail(error)

    def _worker(self) -> Worker | None:
        return None if self.worker is None else self.worker()


class EngineThread:
    """A thread that runs commands and steps, from the model's loading until it is freed.

    Attributes:
        shares_file: whether what it changes lies in a mapped file, which a forked process shares.
    """

    def __init__(self) -> None:
        self.shares_file = False
        self._starting = threading.Lock()
        self._start(_Body())

    def attach(self, worker: Worker) -> None:
        """Have the thread make a worker's steps, as long as others refer to the worker."""
        self._body.worker = weakref.ref(worker)

    def soon(self, command: Command) -> None:
        """Run a command after the current step; safe from any thread and from `__del__`."""
        self._body.commands.append(command)
        self.poke()

    def poke(self) -> None:
        """Have the thread look whether there is work; safe from any thread and from `__del__`."""
        self._body.pokes.put(None)

    def call(self, function: Callable[[], T], *, stop: threading.Event | None = None) -> T:
        """Call a function between two steps, and return its result.

        After an interrupt the function is not called, unless it has begun; then the end of the
        program waits for it.

        Args:
            stop: event that an interrupt sets, so that a long function ends.

        Raises:
            OptionError, EdgeLLMError: see `check`.
            BaseException: an exception of the function.
        """
        self.check()
        results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        abandoned = False

        def command() -> None:
            if abandoned:
                return
            try:
                results.put((function(), None))
            except BaseException as error:
                results.put((None, error))

        try:
            self.soon(command)
            result, error = self.wait(results)
        except BaseException:
            abandoned = True
            if stop is not None:
                stop.set()
            raise
        try:
            if error is not None:
                raise error
            return result  # type: ignore[return-value]
        finally:
            del result, error  # the traceback refers to this frame

    def catch_up(self) -> None:
        """Wait until all commands before have run."""
        self.call(bool)

    def each(self, items: Generator[T, None, None]) -> Iterator[T]:
        """Iterate items that are made in the engine's thread; other work goes on between them."""
        end = object()
        try:
            while (item := self.call(lambda: next(items, end))) is not end:
                yield item  # type: ignore[misc]
        finally:
            self.soon(items.close)

    def wait(self, results: queue.SimpleQueue[T]) -> T:
        """Wait for an item that the engine's thread puts into a queue.

        Raises:
            EdgeLLMError: the thread has ended.
        """
        while True:
            try:
                return results.get(timeout=_PATIENCE_S)
            except queue.Empty:
                self.check()

    def check(self) -> None:
        """Refuse to go on where no thread would; starts one in a process that was forked.

        Raises:
            OptionError: the process was forked in the middle of a step or shares a file with the
                one before, or a callback asks, for which the thread waits.
            EdgeLLMError: the thread has ended.
        """
        if threading.current_thread() is self._thread:
            raise OptionError(
                "a `progress` or `logit_filter` callback used the model that calls it, which waits "
                "for the callback; use the model after the answer, or load another one"
            )
        if self._process != os.getpid():
            self._start_in_child()
        if self._body.ended:
            raise EdgeLLMError("the engine's thread has ended; load the model again")

    def _start(self, body: _Body) -> None:
        # a daemon, as it waits as long as the model lives; `_end` waits for a step at the exit
        thread = threading.Thread(target=body.run, name="edgellm-engine", daemon=True)
        thread.start()
        weakref.finalize(self, _end, body, thread)
        self._body, self._thread = body, thread
        self._process = os.getpid()  # at last: other threads look at it

    def _start_in_child(self) -> None:
        with self._starting:
            if self._process == os.getpid():  # another thread was faster
                return
            if self.shares_file:
                raise OptionError(
                    "this process was forked, and would write into the blocks that `kv_spill` has "
                    "in a file of its parent; load the model in the new process"
                )
            before = self._body
            worker = None if before.worker is None else before.worker()
            if before.busy or (worker is not None and worker.away):
                raise OptionError(
                    "this process was forked while the model computed, and has half of a step; "
                    "load the model in the new process, or fork while nothing is answered"
                )
            body = _Body()
            body.commands, body.worker = before.commands, before.worker
            self._start(body)
            self.poke()


def _end(body: _Body, thread: threading.Thread) -> None:
    """End a thread; at the exit of the program, wait for its step."""
    body.stopped = True
    body.pokes.put(None)
    if not threading.main_thread().is_alive() and thread is not threading.current_thread():
        thread.join()
