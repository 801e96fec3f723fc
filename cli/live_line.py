"""An answer on standard output, with a status line in the terminal's last row meanwhile."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack

import click
from prompt_toolkit.utils import get_cwidth

from edgellm.cli.interrupt import around_stop
from edgellm.cli.text import without_controls

# Time between two status lines: short enough to look alive, long enough to cost nothing.
_INTERVAL_S = 0.1


class LiveLine:
    """Status line in a terminal's last row, below the answer that scrolls.

    The row is taken out of the scrolling region (DECSTBM of the VT100), and given back at the end.
    Without a terminal on both standard output and standard error, no status line is shown.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._on_terminal = sys.stdout.isatty()
        shows = self._on_terminal and sys.stderr.isatty() and os.name == "posix"
        self._enabled = enabled and shows and os.environ.get("TERM", "dumb") != "dumb"
        self._shown_at = 0.0
        # size of the window when the last row was taken; 0 rows: it is not taken
        self._window = os.terminal_size((0, 0))
        self._line = ""  # the answer from its last line end on
        self._stack = ExitStack()

    def __enter__(self) -> LiveLine:
        if self._enabled:
            self._stack.enter_context(around_stop(self._give_back, self._begin_line))
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        self._stack.close()

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write a part of the answer; a terminal gets no control characters.

        The answer has to begin in column 0.
        """
        if self._on_terminal:
            text = without_controls(text)
        if self._enabled:
            self._follow_window()
        if dim:
            click.echo(click.style(text, dim=True), nl=False)
        else:
            sys.stdout.write(text)  # click would take colours out of what goes to a file
            sys.stdout.flush()
        if self._enabled:
            self._line = f"{self._line}{text}".rpartition("\n")[2]
            self._follow_window()

    def show(self, text: str) -> None:
        """Show `text` in the status line, unless it was written less than _INTERVAL_S ago.

        The line stays as it is while the answer's last column is full: some terminals forget, when
        the cursor is restored, that the next character goes to the next line.
        """
        now = time.monotonic()
        if not self._enabled or now - self._shown_at < _INTERVAL_S:
            return
        self._shown_at = now
        window = self._follow_window()
        if window.lines < 3 or self._column(window) >= window.columns:
            return
        if window != self._window:
            # Down and up again, in case that the cursor is in the last row. IND goes down in its
            # column; before a line feed the terminal's driver would put a carriage return.
            self._window = window
            _write(f"\x1b7\x1b[r\x1b8\x1bD\x1b[1A\x1b7\x1b[1;{window.lines - 1}r\x1b8")
        _write(f"\x1b7\x1b[{window.lines};1H\x1b[2K{text[: window.columns - 1]}\x1b8")

    def _follow_window(self) -> os.terminal_size:
        """Erase all behind the answer if the window was resized, and return the window's size.

        Terminals move and wrap all rows then, each in its own way. Behind the cursor there is only
        the status line, or what has become of it.
        """
        window = os.get_terminal_size(sys.stdout.fileno())  # the real one, whatever LINES says
        changed = self._window.lines > 0 and window != self._window
        if changed and self._column(window) < window.columns:
            self._window = os.terminal_size((0, 0))
            _write("\x1b7\x1b[r\x1b8\x1b[J")
        return window

    def _give_back(self) -> None:
        """Clear the status line, and let all rows scroll again."""
        if rows := self._window.lines:
            self._window = os.terminal_size((0, 0))
            _write(f"\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8")

    def _begin_line(self) -> None:
        """Count columns from 0 again, behind the text of the shell that Ctrl-Z led to."""
        self._line = ""

    def _column(self, window: os.terminal_size) -> int:
        """Return the cursor's column; `window.columns` if the next character starts a new row."""
        column = 0
        for character in self._line:
            width = get_cwidth(character)
            if character == "\t":
                column = min(window.columns - 1, column // 8 * 8 + 8)
            else:
                column = width if column + width > window.columns else column + width
        return column


def _write(codes: str) -> None:
    os.write(sys.stderr.fileno(), codes.encode())  # at once, also from within a signal handler
