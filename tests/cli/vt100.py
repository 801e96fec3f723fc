"""The screen of a VT100, with what has scrolled off its top.

pyte takes shortcuts where terminals agree with each other; a program that looks right with these
shortcuts can look wrong to a user.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pyte
from wcwidth import wcwidth


class Vt100(pyte.Screen):
    """Rows of text, a cursor and a scrolling region.

    The cursor's column is `columns` after a character in the last column: the next one goes to the
    next row.

    Args:
        reply: takes what the terminal answers to a program that asks it, e.g. for its cursor.
        reflows: a window of another width wraps rows anew, as in tmux and VTE; xterm leaves them.
        keeps_wrap: a restored cursor still waits to go to the next row, as xterm's and VTE's do;
            tmux and the Linux console forget it.
    """

    def __init__(
        self,
        columns: int,
        lines: int,
        reply: Callable[[str], None],
        *,
        keeps_wrap: bool = True,
        reflows: bool = False,
    ) -> None:
        self._reply = reply
        self._keeps_wrap = keeps_wrap
        self._reflows = reflows
        self.scrolled: list[str] = []
        self._saved_cursor = pyte.screens.Cursor(0, 0)
        super().__init__(columns, lines)

    def write_process_input(self, data: str) -> None:
        self._reply(data)

    def report_device_status(self, mode: int, **_: Any) -> None:
        # a cursor that waits to go to the next row is still in the last column
        at, self.cursor = self.cursor, copy.copy(self.cursor)
        self.ensure_hbounds()
        super().report_device_status(mode)
        self.cursor = at

    def draw(self, data: str) -> None:
        for character in data:
            if wcwidth(character) == 2 and self.cursor.x == self.columns - 1:
                self.cursor.x = self.columns  # too wide for what is left of the row
            if self.cursor.x == self.columns:
                self.buffer[self.cursor.y].goes_on = True  # in the next row
            super().draw(character)

    def index(self) -> None:
        top, bottom = self.margins or (0, self.lines - 1)
        if self.cursor.y == bottom and top == 0:
            self.scrolled.append(self.display[0].rstrip())
        super().index()

    def cursor_down(self, count: int | None = None) -> None:
        _, bottom = self.margins or (0, self.lines - 1)
        last = bottom if self.cursor.y <= bottom else self.lines - 1
        self.cursor.y = min(self.cursor.y + (count or 1), last)
        self.ensure_hbounds()

    def cursor_up(self, count: int | None = None) -> None:
        top, _ = self.margins or (0, self.lines - 1)
        first = top if self.cursor.y >= top else 0
        self.cursor.y = max(self.cursor.y - (count or 1), first)
        self.ensure_hbounds()

    def set_margins(self, top: int | None = None, bottom: int | None = None, **_: Any) -> None:
        """DECSTBM; without parameters the region is the whole screen. The cursor goes home."""
        first, last = top or 1, min(bottom or self.lines, self.lines)
        if first < last:
            whole = (first, last) == (1, self.lines)
            self.margins = None if whole else pyte.screens.Margins(first - 1, last - 1)
            self.cursor_position()

    def save_cursor(self) -> None:
        self._saved_cursor = copy.copy(self.cursor)

    def restore_cursor(self) -> None:
        """There is one place to save to; restoring twice gives the same twice."""
        self.cursor = copy.copy(self._saved_cursor)
        self.cursor.x = min(self.cursor.x, self.columns - (not self._keeps_wrap))
        self.ensure_vbounds()

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        self.ensure_hbounds()  # the last column goes too
        super().erase_in_line(how, private)

    def erase_in_display(self, how: int = 0, *rest: Any, **private: Any) -> None:
        if how == 3:
            self.scrolled.clear()
        else:
            super().erase_in_display(how, *rest, **private)

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """As xterm and tmux do it: rows below the cursor go first, then rows at the top."""
        if self._reflows:
            self._reflow(columns or self.columns)
        at, too_low = self.cursor, max(0, self.cursor.y + 1 - (lines or self.lines))
        self.margins = None
        for _ in range(too_low):
            self.cursor = pyte.screens.Cursor(0, self.lines - 1)
            self.index()
        kept = {y: line for y, line in self.buffer.items() if y < (lines or self.lines)}
        self.buffer.clear()
        self.buffer.update(kept)
        self.lines, self.columns = lines or self.lines, columns or self.columns
        self.cursor = at
        self.cursor.y -= too_low
        self.ensure_hbounds()

    def _reflow(self, columns: int) -> None:
        """Wrap all rows anew; the cursor stays behind the character that it was behind."""
        wrapped: list[list[Any]] = [[]]  # lines before they were wrapped
        line, place = 0, 0
        for y in range(self.lines):
            row = self.buffer[y]
            if y == self.cursor.y:
                line, place = len(wrapped) - 1, len(wrapped[-1]) + self.cursor.x
            goes_on = getattr(row, "goes_on", False)
            full = [x for x in row if goes_on or row[x].data != " "]
            wrapped[-1] += [row[x] for x in range(max(full, default=-1) + 1)]
            if not goes_on:
                wrapped.append([])
        self.buffer.clear()
        y = 0
        for number, characters in enumerate(wrapped[:-1]):
            if number == line:
                rows = max(0, place - 1) // columns
                self.cursor.y, self.cursor.x = y + rows, place - rows * columns
            for start in range(0, len(characters) or 1, columns):
                self.buffer[y].update(enumerate(characters[start : start + columns]))
                self.buffer[y].goes_on = start + columns < len(characters)
                y += 1
        self.lines = max(self.lines, y)
