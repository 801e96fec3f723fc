"""Signal handlers while an answer is written.

The first Ctrl-C stops the answer, the second one the program. SIGTERM ends the program by an
exception, so that the terminal is put in order first. Ctrl-Z waits for that, too.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Exit code of a shell command that Ctrl-C has ended.
INTERRUPTED = 130


def note_interrupts() -> threading.Event:
    """Return an event that is set when Ctrl-C raises KeyboardInterrupt.

    C code that is interrupted, such as a module's initialization, raises another exception instead.
    """
    interrupted = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    return interrupted


@contextmanager
def cancel_on_interrupt() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets.

    A second Ctrl-C raises KeyboardInterrupt, and SIGTERM raises SystemExit.
    """
    cancel = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        with exit_on_terminate():
            yield cancel
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def exit_on_terminate() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, with the code that shells give a process ended by a signal."""

    def handle(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def around_stop(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call `before` when Ctrl-Z is about to stop the program, and `after` when it goes on.

    Blocks may be nested: the inner block's `before` is called first, and its `after` last.
    """
    if not hasattr(signal, "SIGTSTP"):  # Windows
        yield
        return
    stop = signal.SIGTSTP
    previous = signal.getsignal(stop)

    def handle(number: int, frame: FrameType | None) -> None:
        before()
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(stop, signal.SIG_DFL)
            signal.raise_signal(stop)  # comes back when the program goes on
            signal.signal(stop, handle)
        after()

    if previous is not signal.SIG_IGN:  # ignored under a shell that stops no programs
        signal.signal(stop, handle)
    try:
        yield
    finally:
        signal.signal(stop, previous)
