"""Stop texts that may be split over tokens. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Lets text through until a stop text begins; what might be its beginning is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that is safe to show; after a stop text nothing more is."""
        if self.found:
            return ""
        self._held += text
        hits = [at for at in map(self._held.find, self._stops) if at >= 0]
        if hits:
            self.found = True
            shown, self._held = self._held[: min(hits)], ""
            return shown
        keep = self._unfinished()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """What was held back and turned out to be ordinary text."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
