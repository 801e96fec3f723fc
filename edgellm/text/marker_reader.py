"""Reader of markers in text that arrives in pieces; its generators yield to wait. Pure Python."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from edgellm.text.tool_format import INDEX_SLOT, KEY_SLOT, NAME_SLOT, SLOTS, chunks

# A generator that yields until there is enough text, and returns whether the part was read.
Reading = Generator[None, None, bool]
_LONGEST_SLOT = 256
_NO, _MORE = -1, -2


class MarkerReader:
    """Reader of a text that arrives in pieces.

    Attributes:
        text: text received and not yet forgotten.
        at: offset in `text` of the reading place.
        ended: whether the text is complete.
        slots: texts found in the slots of the markers read last, by slot.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.slots: dict[str, str] = {}

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    @property
    def empty(self) -> bool:
        return self.at == len(self.text)

    def add(self, text: str) -> None:
        """Append a piece of text."""
        self.text += text

    def forget(self) -> None:
        """Drop the text before the reading place; no caller may go back before it."""
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Reading:
        """Wait for at least one more character; False if the text has ended."""
        size = len(self.text)
        while len(self.text) == size:
            if self.ended:
                return False
            yield
        return True

    def space(self) -> Reading:
        """Read white space; True if another character follows."""
        while True:
            while not self.empty and self.text[self.at].isspace():
                self.at += 1
            if not self.empty:
                return True
            if not (yield from self.more()):
                return False

    def marker(self, marker: str, *, unfinished: bool = False) -> Reading:
        """Read a marker; False, with no text read, if it is not there.

        Args:
            marker: text with slots; any white space matches any other or none.
            unfinished: whether the beginning of the marker suffices at the end of the text.
        """
        parts = chunks(marker)
        while True:
            end = self._match(parts)
            if end == _MORE and not self.ended:
                yield
                continue
            if end == _MORE and unfinished:
                end = len(self.text)
            if end < 0:
                return False
            self.at = end
            return True

    def first_of(self, markers: Sequence[str]) -> Generator[None, None, int]:
        """Read the first marker that is there, and return its index; -1 if there is none."""
        for i, marker in enumerate(markers):
            if (yield from self.marker(marker)):
                return i
        return -1

    def until(self, text: str, *, limit: int | None = None) -> Generator[None, None, str | None]:
        """Read and return the part before `text`; None if it is not within `limit` characters."""
        while True:
            end = self.text.find(text, self.at)
            if end >= 0:
                value, self.at = self.text[self.at : end], end
                return value
            if limit is not None and len(self.text) - self.at > limit:
                return None
            if not (yield from self.more()):
                return None

    def _match(self, parts: Sequence[str]) -> int:
        """Return the offset after the marker at the reading place.

        `_NO` if the marker is not there, `_MORE` if more text is needed to tell.
        """
        at, text = self.at, self.text
        filled: dict[str, str] = {}
        for i, part in enumerate(parts):
            if part == " ":
                while at < len(text) and text[at].isspace():
                    at += 1
                if at == len(text) and not self.ended:
                    return _MORE
                continue
            if part in SLOTS:
                end = self._slot(part, parts[i + 1 : i + 2], at)
                if end < 0:
                    return end
                filled[part] = text[at:end]
                at = end
                continue
            if not text.startswith(part, at):
                return _MORE if part.startswith(text[at:]) else _NO
            at += len(part)
        self.slots.update(filled)
        return at

    def _slot(self, slot: str, following: Sequence[str], at: int) -> int:
        text = self.text
        known = self.slots.get(slot) if slot in (NAME_SLOT, KEY_SLOT) else None
        if known is not None:
            if text.startswith(known, at):
                return at + len(known)
            return _MORE if known.startswith(text[at:]) else _NO
        end = at
        if slot == INDEX_SLOT:
            while end < len(text) and text[end].isdigit():
                end += 1
            return _MORE if end == len(text) else end if end > at else _NO
        end = text.find(following[0], at) if following else -1
        if end < 0:
            return _NO if len(text) - at > _LONGEST_SLOT else _MORE
        return end


def hold_back(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of a text that may begin one of the markers."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
