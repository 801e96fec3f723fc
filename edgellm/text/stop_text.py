"""Detection of stop texts, which may be split over tokens, in a stream of text. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopText:
    """A filter that lets text through until a stop text; a possible beginning of one is held back.

    Args:
        stops: the stop texts.
        min_indent: minimum indent in characters; a line that is indented less, and is not blank,
            stops the text as well, at the line end before it. 0: no such stop.

    Attributes:
        stopped: whether the text has been stopped.
        stop: the stop text found; None if a line that is indented less stopped the text.
    """

    def __init__(self, stops: Sequence[str], *, min_indent: int = 0) -> None:
        self._stops = tuple(stops)
        less = max(0, min_indent - 1)
        self._outdent = re.compile(rf"\n[ \t]{{0,{less}}}[^ \t\r\n]") if min_indent else None
        self._indent = re.compile(rf"\n[ \t]{{0,{less}}}\Z") if min_indent else None
        self._held = ""
        self.stopped = False
        self.stop: str | None = None

    def add(self, text: str) -> str:
        """Take a piece of text, and return the text that is safe to show; "" after a stop."""
        if self.stopped:
            return ""
        self._held += text
        hits: list[tuple[int, str | None]] = [
            (at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        outdent = self._outdent and self._outdent.search(self._held)
        if outdent:
            hits.append((outdent.start(), None))
        if hits:
            at, self.stop = min(hits, key=lambda hit: hit[0])
            self.stopped = True
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._unfinished()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """End the text, and return the part that was held back and is no stop text."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self) -> int:
        """Return the length of the longest end of the held text that may begin a stop."""
        indent = self._indent and self._indent.search(self._held)
        at_line_start = len(self._held) - indent.start() if indent else 0
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return max(length, at_line_start)
        return at_line_start
