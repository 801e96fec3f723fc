"""Scanner of JSON that arrives in pieces, up to the end of one JSON value. Pure Python."""

from __future__ import annotations

import re

_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?)?")
_WORDS = ("true", "false", "null")
_MAX_DEPTH = 128


class JsonScanner:
    """Scanner of the characters of one JSON value, which stops at one that cannot belong to it.

    Attributes:
        done: whether the value is complete; a number is only with a character after it.
        failed: whether a character came that makes the text no JSON.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._closers: list[str] = []  # closing brackets awaited, the innermost last
        self._expects = "value"
        self._word = ""  # a number, or one of `_WORDS`, as far as it was read
        self._hex = 0  # digits still missing after \u
        self._is_key = False

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        """Scan characters of `text` from `at` on, up to the end of the value.

        Returns:
            The characters scanned, with control characters in strings escaped, and the offset after
            them.
        """
        taken: list[str] = []
        while at < len(text) and not (self.done or self.failed):
            if self._expects == "string":
                end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
                if end > at:
                    taken.append(text[at:end])
                    at = end
                    continue
            shown = self._take(text[at])
            if shown is None:
                continue  # a number ended before this character
            if not self.failed:
                taken.append(shown)
                at += 1
        return "".join(taken), at

    def _take(self, char: str) -> str | None:
        """Scan one character; None if it ends a number and must be scanned again after that."""
        if self._expects == "string":
            return self._in_string(char)
        if self._expects == "escape":
            self._expects, self._hex = "string", 4 if char == "u" else 0
            self._expects = "hex" if self._hex else "string"
            self.failed = char not in 'u"\\/bfnrt'
        elif self._expects == "hex":
            self._hex -= 1
            self._expects = "hex" if self._hex else "string"
            self.failed = char not in "0123456789abcdefABCDEF"
        elif self._expects == "word":
            return self._in_word(char)
        elif char not in _SPACE:
            self._structure(char)
        return char

    def _in_string(self, char: str) -> str:
        if char == '"':
            self._expects = "colon" if self._is_key else "comma"
            self.done = not self._closers
            return char
        if char == "\\":
            self._expects = "escape"
            return char
        return f"\\u{ord(char):04x}"  # models write line ends as they are

    def _in_word(self, char: str) -> str | None:
        word = self._word + char
        if any(known.startswith(word) for known in _WORDS) or _NUMBER_BEGUN.fullmatch(word):
            self._word = word
            if word in _WORDS:
                self._value_ended()
            return char
        if not _NUMBER.fullmatch(self._word):
            self.failed = True
            return char
        self._value_ended()
        return None

    def _structure(self, char: str) -> None:
        expects, closers = self._expects, self._closers
        if closers and char == closers[-1] and expects in ("comma", "key or end", "value or end"):
            closers.pop()
            self._value_ended()
        elif expects == "comma" and char == ",":
            self._expects = "key" if closers[-1] == "}" else "value"
        elif expects == "colon" and char == ":":
            self._expects = "value"
        elif expects.startswith("key") and char == '"':
            self._expects, self._is_key = "string", True
        elif expects.startswith("value"):
            self._begin_value(char)
        else:
            self.failed = True

    def _begin_value(self, char: str) -> None:
        if char == '"':
            self._expects, self._is_key = "string", False
        elif char in "{[" and len(self._closers) < _MAX_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._expects = "key or end" if char == "{" else "value or end"
        elif char in "-0123456789tfn":
            self._expects, self._word = "word", char
        else:
            self.failed = True

    def _value_ended(self) -> None:
        self._expects = "comma"
        self.done = not self._closers
