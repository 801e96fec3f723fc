"""Conversion of tool call arguments that models write in other forms than JSON. Pure Python."""

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
