"""Values in tool calls: JSON that arrives in pieces, and other forms as JSON. Pure Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_BARE_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_CDATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)  # XML's way to quote
_PYTHON_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_SCALAR = re.compile(r"[^,}\]]*")
_MAX_DEPTH = 64


def tagged_value(text: str, schema: Mapping[str, Any] | None, *, is_json: bool) -> str:
    """Return the JSON of an argument that a model wrote between tags.

    Args:
        text: the argument as written.
        schema: JSON schema of the argument, or None; if it allows a string, `text` stays one unless
            `is_json`.
        is_json: whether the tags mark the argument as JSON instead of text.
    """
    quoted = _CDATA.fullmatch(text)
    if quoted is not None:
        return json.dumps(quoted[1], ensure_ascii=False)
    if not is_json and schema is not None and "string" in _types(schema):
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _PYTHON_WORDS.get(text.strip(), text)
        if isinstance(value, str) and text.strip()[:1] in ("{", "["):
            value = _python_literal(text)
    if isinstance(value, str) and not is_json:
        value = text
    return json.dumps(value, ensure_ascii=False)


def python_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call `name(key=literal, ...)`.

    Args:
        text: the call without its name, from `(` to `)`.

    Raises:
        ValueError: `text` has another form.
    """
    escaped = _PYTHON_TEXT.sub(lambda m: m[0].replace("\n", "\\n").replace("\r", "\\r"), text)
    try:
        call = _JsonWords().visit(ast.parse(f"f{escaped}", mode="eval")).body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no call") from None
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call with names for its arguments")
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        values[keyword.arg] = ast.literal_eval(keyword.value)
    json.dumps(values)  # no sets, no complex numbers
    return values


class _JsonWords(ast.NodeTransformer):
    """Replacement of `true`, `false` and `null`, which models write in Python notation, too."""

    _WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._WORDS[node.id]) if node.id in self._WORDS else node


def brace_arguments(text: str, quote: str) -> dict[str, Any]:
    """Parse arguments of the form `{key:value,...}` whose texts stand between `quote`.

    Raises:
        ValueError: `text` has another form.
    """
    value, end = _brace_value(text, 0, quote, 0)
    if end != len(text) or not isinstance(value, dict):
        raise ValueError("no arguments")
    return value


def _brace_value(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    at = _behind_space(text, at)
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return _brace_items(text, at + 1, quote, depth, "}")
    if text.startswith("[", at):
        return _brace_items(text, at + 1, quote, depth, "]")
    match = _SCALAR.match(text, at)
    assert match is not None
    return json.loads(match[0]), match.end()


def _brace_items(text: str, at: int, quote: str, depth: int, closer: str) -> tuple[Any, int]:
    values: dict[str, Any] = {}
    while True:
        at = _behind_space(text, at)
        if text.startswith(closer, at):
            return (values if closer == "}" else list(values.values())), at + 1
        if values:
            if not text.startswith(",", at):
                raise ValueError("no comma")
            at = _behind_space(text, at + 1)
        key = str(len(values))
        if closer == "}":
            key, at = _brace_key(text, at, quote)
        values[key], at = _brace_value(text, at, quote, depth + 1)


def _brace_key(text: str, at: int, quote: str) -> tuple[str, int]:
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], text.index(":", end) + 1
    match = _BARE_KEY.match(text, at)
    if match is None:
        raise ValueError("no key")
    return match[1].strip('"'), match.end()


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _python_literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows by type, anyOf, oneOf, or an enum of strings."""
    kind = schema.get("type")
    given = [kind] if isinstance(kind, str) else _listed(kind)
    types = {each for each in given if isinstance(each, str)}
    if any(isinstance(value, str) for value in _listed(schema.get("enum"))):
        types.add("string")
    for part in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        types |= _types(part) if isinstance(part, Mapping) else set()
    return types


def _listed(value: object) -> list[Any]:
    """Return a keyword's list, or an empty one for a schema that is wrong there."""
    return value if isinstance(value, list) else []


_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?)?")
_WORDS = ("true", "false", "null")
_MAX_JSON_DEPTH = 128


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
        elif char in "{[" and len(self._closers) < _MAX_JSON_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._expects = "key or end" if char == "{" else "value or end"
        elif char in "-0123456789tfn":
            self._expects, self._word = "word", char
        else:
            self.failed = True

    def _value_ended(self) -> None:
        self._expects = "comma"
        self.done = not self._closers
