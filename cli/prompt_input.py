"""Lines that a user types: edited, completed, and remembered in EDGELLM_HOME/history."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.utils import is_dumb_terminal

from edgellm.cli.interrupt import around_stop
from edgellm.cli.text import say
from edgellm.store.home import home


class PromptInput:
    """Reader of lines from the terminal. Keys typed between two reads are kept for the second one.

    Attributes:
        typed: whether text had been typed when the last read ended.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        self.typed = False
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=WordCompleter([*commands], sentence=True),
            complete_while_typing=False,
            output=_output(),
        )
        self._between_reads = ExitStack()

    def __enter__(self) -> PromptInput:
        return self

    def __exit__(self, *_: object) -> None:
        self._between_reads.close()

    def read(self, prompt: str, *, begun: bool = False) -> str:
        """Read a line from the terminal.

        Args:
            begun: whether earlier lines of the same message have been typed.

        Raises:
            EOFError: Ctrl-D in an empty line.
            KeyboardInterrupt: Ctrl-C.
        """
        self._between_reads.close()
        try:
            return self._session.prompt(prompt)
        finally:
            self.typed = begun or bool(self._session.default_buffer.text)
            if os.name == "posix":
                app = self._session.app
                self._between_reads.enter_context(type_ahead(app.input, app.output))


def _output() -> Output | None:
    """Return standard error's terminal if standard output goes to a file or another program.

    None stands for prompt_toolkit's own choice, which also suits a dumb terminal.
    """
    if not sys.stdout.isatty() and sys.stderr.isatty():
        return create_output(stdout=sys.stderr)
    return None


def _history() -> History:
    """Open the lines of earlier chats, in a file that only its owner can read.

    If the file cannot be opened, the history is in memory only.
    """
    path = home() / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError as error:
        say(f"{path}: {error.strerror}; no history is kept")
        return InMemoryHistory()
    return FileHistory(str(path))


# Commands to a terminal: mark pasted text, or do not.
_MARK_PASTES, _MARK_NO_PASTES = b"\x1b[?2004h", b"\x1b[?2004l"


@contextmanager
def type_ahead(keys: Input, output: Output) -> Iterator[None]:
    """Read keys in a thread, and keep them for the next prompt.

    Unread keys would fill the terminal's queue of 4,096 bytes, and then Ctrl-C has no effect.
    """
    if not os.isatty(keys.fileno()):
        yield
        return
    typed: list[KeyPress] = []
    ended, end = os.pipe()

    def read() -> None:
        while ended not in select.select([keys.fileno(), ended], [], [])[0] and not keys.closed:
            typed.extend(keys.read_keys())

    reader = threading.Thread(target=read, name="edgellm-type-ahead", daemon=True)
    mode = _Mode(keys.fileno(), output.fileno())
    with around_stop(mode.leave, mode.enter):
        mode.enter()
        reader.start()
        try:
            yield
        finally:
            mode.leave()
            os.close(end)
            reader.join()
            os.close(ended)
            store_typeahead(keys, typed)


class _Mode:
    """Terminal mode that hands on keys at once, without echo, and signals Ctrl-C and Ctrl-Z."""

    def __init__(self, terminal: int, screen: int) -> None:
        self._terminal = terminal
        self._screen = screen
        self._marks = os.isatty(screen) and not is_dumb_terminal()
        self._before = termios.tcgetattr(terminal)

    def enter(self) -> None:
        if self._is_ours():
            mode = termios.tcgetattr(self._terminal)
            mode[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON)
            # a signal must not empty the queue: half a paste would go, and with it the end's mark
            mode[3] = mode[3] & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
            termios.tcsetattr(self._terminal, termios.TCSANOW, mode)
            self._write(_MARK_PASTES)

    def leave(self) -> None:
        if self._is_ours():
            self._write(_MARK_NO_PASTES)
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)

    def _is_ours(self) -> bool:
        """Whether the program is in the foreground; a background program that sets a mode stops."""
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:  # no controlling terminal, so there is no background
            return True

    def _write(self, codes: bytes) -> None:
        if self._marks:
            os.write(self._screen, codes)  # at once, also from within a signal handler
