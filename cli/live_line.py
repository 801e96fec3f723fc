"""A last line of the terminal that changes while text is written above it."""

from __future__ import annotations

import os
import sys
import time

from prompt_toolkit.utils import get_cwidth

# Often enough to look alive, and seldom enough to cost nothing.
_INTERVAL_S = 0.1


class LiveLine:
    """Takes the last row out of the scrolling region (DECSTBM of the VT100), and gives it back.

    Nothing is shown where standard output or error is no terminal.
    """

    def __init__(self, *, enabled: bool) -> None:
        terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.name == "posix"
        self._enabled = enabled and terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._rows = 0
        self._shown_at = 0.0
        self._column = 0

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            _write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
            self._rows = 0

    def wrote(self, text: str) -> None:
        """Follow the cursor over an answer's text, which began in column 0."""
        if not self._enabled:
            return
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
        for character in text:
            width = get_cwidth(character)
            if character == "\n":
                self._column = 0
            elif character == "\t":
                self._column = min(columns - 1, self._column // 8 * 8 + 8)
            else:
                self._column = width if self._column + width > columns else self._column + width

    def show(self, text: str) -> None:
        """Write `text` there, unless it has just been written to.

        Nothing is written while the last column is full: some terminals forget, when the cursor is
        restored, that the next character goes to the next line.
        """
        now = time.monotonic()
        if not self._enabled or now - self._shown_at < _INTERVAL_S:
            return
        self._shown_at = now
        columns, rows = os.get_terminal_size(sys.stdout.fileno())  # as it is, whatever LINES says
        if rows < 3 or self._column >= columns:
            return
        if rows != self._rows:
            # In a larger window, what stands where the last row was.
            old = f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b8" if 0 < self._rows < rows else ""
            # Down and up again, in case that the cursor is in the last row. IND goes down in its
            # column; before a line feed the terminal's driver would put a carriage return.
            _write(f"{old}\x1b7\x1b[r\x1b8\x1bD\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8")
            self._rows = rows
        _write(f"\x1b7\x1b[{rows};1H\x1b[2K{text[: columns - 1]}\x1b8")


def _write(codes: str) -> None:
    sys.stderr.write(codes)
    sys.stderr.flush()
