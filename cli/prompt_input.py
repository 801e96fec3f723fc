"""Lines that a user types: edited, completed, and remembered in EDGELLM_HOME/history."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import Output, create_output

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
                from edgellm.cli.type_ahead import type_ahead

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
