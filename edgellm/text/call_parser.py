"""Streaming parser of tool calls in an answer's text. Pure Python.

Each generator method reads one part of a call and yields when it needs more text. It returns False
or None if that part is not there.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from edgellm.text.call_values import JsonScanner, brace_arguments, python_arguments, tagged_value
from edgellm.text.marker_reader import MarkerReader, Reading
from edgellm.text.tool_format import ID_SLOT, KEY_SLOT, NAME_SLOT, CallFormat, ObjectKeys
from edgellm.tool_use import Tool, ToolCallDelta

_NAME = frozenset(string.ascii_letters + string.digits + "_.-")
_LONGEST_NAME = 128
_LONGEST_KEY = 1000


class CallParser:
    """Parser of tool calls at the reading place of an answer.

    Args:
        format: form of the model's calls.
        emit: function that takes each piece of a call.
        tools: tools whose schemas tell texts from JSON.
        short_ids: whether identifiers have nine letters and digits, as Mistral's templates want.
    """

    def __init__(
        self,
        format: CallFormat,
        reader: MarkerReader,
        emit: Callable[[ToolCallDelta], None],
        *,
        tools: Sequence[Tool] = (),
        short_ids: bool = False,
    ) -> None:
        self._format = format
        self._reader = reader
        self._emit = emit
        self._schemas = {tool.name: tool.schema.get("properties", {}) for tool in tools}
        self._short_ids = short_ids
        self._index = -1

    @property
    def count(self) -> int:
        """Number of tool calls that have begun."""
        return self._index + 1

    def calls(self) -> Reading:
        """Read all calls of a section; False, with nothing read, if there is no call."""
        reader, form, begin = self._reader, self._format, self._reader.at
        before = self._index
        if not (yield from reader.marker(form.section)):
            reader.at = begin
            return False
        going_on = True
        while going_on:
            at, known = reader.at, self._index
            complete = yield from self._call()
            if self._index == known:
                reader.at = at if self._index > before else begin
                return self._index > before
            going_on = complete and (yield from self._next())
        return True

    def bare(self) -> Reading:
        """Read one call of a known tool, an object without markers; False if there is none.

        Nothing of it is a call until all of it is right: other text may begin like one.
        """
        reader, keys, begin = self._reader, self._format.keys, self._reader.at
        assert keys is not None
        if not (yield from reader.marker(" { ")):
            return False
        key = yield from self._value()
        if key != json.dumps(keys.name) or not (yield from reader.marker(" : ")):
            return False  # other objects are shown as they arrive
        if not (yield from reader.space()) or reader.text[reader.at] != '"':
            return False
        name = yield from self._value()
        if name is None or json.loads(name) not in self._schemas:
            return False
        reader.at = begin
        text = yield from self._value()
        arguments = None if text is None else _bare_arguments(text, json.loads(name), keys)
        if arguments is None:
            return False
        self._announce(str(json.loads(name)), None)
        self._fragment(arguments)
        return True

    def _call(self) -> Reading:
        """Read one call; False if it is missing or not complete."""
        reader, form = self._reader, self._format
        reader.slots = {}
        if form.open and not (yield from reader.marker(f" {form.open}")):
            return False
        if form.kind == "object":
            complete = yield from self._object()
        else:
            read = {
                "json": self._json,
                "tagged": self._tagged,
                "python": self._python,
                "braces": self._braces,
            }[form.kind]
            name = yield from self._name()
            complete = name is not None and (yield from read(name))
        if complete and form.kind != "tagged":
            yield from reader.marker(form.close, unfinished=True)
        return complete

    def _next(self) -> Reading:
        """Read the text between two calls, or after the last one; True if a call follows."""
        reader, form = self._reader, self._format
        begin = reader.at
        if form.section_close.strip() and (
            yield from reader.marker(f" {form.section_close}", unfinished=True)
        ):
            return False
        if form.between.strip():
            if not (yield from reader.marker(f" {form.between}")):
                return False
        elif not form.section.strip() and form.begin.strip():
            return False  # the answer parser finds the first marker of a call anywhere
        elif not form.begin.strip():
            yield from reader.marker(" ;" if (yield from self._semicolon()) else " ")
        at = reader.at
        if form.open.strip():
            follows = yield from reader.marker(f" {form.open}")
        else:
            follows = (yield from reader.space()) and (
                form.kind != "object" or reader.text[reader.at] == "{"
            )
        reader.at = at if follows else begin
        return follows

    def _semicolon(self) -> Reading:
        """Whether a semicolon comes next, as between the calls of Llama 3."""
        reader, at = self._reader, self._reader.at
        follows = (yield from reader.space()) and reader.text[reader.at] == ";"
        reader.at = at
        return follows

    def _name(self) -> Generator[None, None, str | None]:
        reader = self._reader
        begin = reader.at
        while True:
            while not reader.empty and reader.text[reader.at] in _NAME:
                reader.at += 1
            name = reader.text[begin : reader.at]
            if not reader.empty or len(name) > _LONGEST_NAME:
                break
            if not (yield from reader.more()):
                break
        if not name or len(name) > _LONGEST_NAME:
            return None
        reader.slots[NAME_SLOT] = name
        return name

    # arguments of each kind of call, read from after the name on

    def _json(self, name: str) -> Reading:
        reader = self._reader
        if not (yield from reader.marker(self._format.middle)) or not (yield from reader.space()):
            return False
        if reader.text[reader.at] != "{":
            return False
        self._announce(name, reader.slots.get(ID_SLOT))
        return (yield from self._arguments())

    def _tagged(self, name: str) -> Reading:
        reader, form = self._reader, self._format
        tags = form.tags
        assert tags is not None
        if not (yield from reader.marker(form.middle)):
            return False
        comma, close, known = "{", f" {form.close}", self._index
        while not (yield from reader.marker(close, unfinished=comma != "{")):
            if not (yield from reader.marker(f" {tags.key_open}")):
                return False
            if self._index == known:
                self._announce(name, reader.slots.get(ID_SLOT))
            item = yield from self._parameter(self._schemas.get(name, {}))
            if item is None:
                return False
            self._fragment(f"{comma}{item}")
            comma = ", "
        if self._index == known:
            self._announce(name, reader.slots.get(ID_SLOT))
        self._fragment("{}" if comma == "{" else "}")
        return True

    def _parameter(self, properties: Mapping[str, Any]) -> Generator[None, None, str | None]:
        """Read one argument, from after its key's marker on; returns JSON text `"key": value`."""
        reader, tags = self._reader, self._format.tags
        assert tags is not None
        reader.slots.pop(KEY_SLOT, None)
        behind = (*tags.texts, *tags.values)
        first = behind[0].split()[0] if behind[0].split() else behind[0]
        key = yield from reader.until(first, limit=_LONGEST_KEY)
        if key is None:
            return None
        key = key.strip()
        reader.slots[KEY_SLOT] = key
        which = yield from reader.first_of([marker.rstrip() for marker in behind])
        if which < 0:
            return None
        close = tags.value_close.replace(KEY_SLOT, key)
        value = yield from reader.until(close.strip())
        if value is None or not (yield from reader.marker(close.lstrip())):
            return None
        opened = behind[which]
        lead = opened[len(opened.rstrip()) :]
        tail = close[: len(close) - len(close.lstrip())]
        value = value.removeprefix(lead).removesuffix(tail)
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        is_json = which >= len(tags.texts) and tags.values != tags.texts
        known = schema if isinstance(schema, Mapping) else None
        if tags.values != tags.texts and not is_json:
            known = {"type": "string"}
        return f"{json.dumps(key, ensure_ascii=False)}: " + tagged_value(
            value, known, is_json=is_json
        )

    def _python(self, name: str) -> Reading:
        text = yield from self._enclosed("(", quotes="'\"")
        return self._whole(name, text, python_arguments)

    def _braces(self, name: str) -> Reading:
        quote = self._format.quote
        text = yield from self._enclosed("{", quotes=(quote,))
        return self._whole(name, text, lambda body: brace_arguments(body, quote))

    def _whole(
        self, name: str, text: str | None, arguments: Callable[[str], dict[str, Any]]
    ) -> bool:
        """Emit a call with all of its arguments; False, with no call emitted, if they are wrong."""
        try:
            values = None if text is None else arguments(text)
        except (ValueError, TypeError, RecursionError):
            values = None
        if values is None:
            return False
        self._announce(name, self._reader.slots.get(ID_SLOT))
        self._fragment(json.dumps(values, ensure_ascii=False))
        return True

    def _enclosed(self, opener: str, *, quotes: Sequence[str]) -> Generator[None, None, str | None]:
        """Read from a bracket to the one that closes it; brackets between quotes do not count."""
        reader = self._reader
        begin = at = reader.at
        longest = max(map(len, quotes))
        depth, quote = 0, ""
        while True:
            rest = reader.text[at : at + longest]
            begun = any(q.startswith(rest) and q != rest for q in quotes)
            if begun and (yield from reader.more()):
                continue
            if not rest:
                return None
            if rest[0] == "\\" and len(quote) == 1:
                at += 2
                continue
            mark = quote or next((q for q in quotes if rest.startswith(q)), "")
            if mark and rest.startswith(mark):
                quote = "" if quote else mark
                at += len(mark)
                continue
            if not quote:
                depth += (rest[0] in "([{") - (rest[0] in ")]}")
            at += 1
            if depth <= 0 and not quote:
                reader.at = at
                return reader.text[begin:at] if reader.text[begin] == opener else None

    def _object(self) -> Reading:
        reader, keys = self._reader, self._format.keys
        assert keys is not None
        call = _ObjectCall(self, wait_for_id=keys.id is not None and keys.id_last)
        if not (yield from reader.marker(" { ")):
            return False
        while not (yield from reader.marker(" }")):
            if call.values and not (yield from reader.marker(" , ")):
                return False
            key = yield from self._value()
            if key is None or not key.startswith('"') or not (yield from reader.marker(" : ")):
                return False
            label = str(json.loads(key))
            call.values += 1
            if keys.name is None:
                call.name = label
            if keys.name is None or (not call.begun and label in keys.argument_names):
                complete = yield from call.read_arguments()
                if not complete:
                    return False
                continue
            value = yield from self._value()
            if value is None:
                return False
            if label == keys.name or label == keys.id:
                text = json.loads(value) if value.startswith('"') else value
                if label == keys.name and not (value.startswith('"') and _is_name(text)):
                    return False
                if label == keys.name:
                    call.name = text
                else:
                    call.id = text
        return call.end()

    def _value(self) -> Generator[None, None, str | None]:
        """Read a whole JSON value; None if it is wrong or not complete."""
        reader, scanner, taken = self._reader, JsonScanner(), ""
        while True:
            text, reader.at = scanner.feed(reader.text, reader.at)
            taken += text
            if scanner.done:
                return taken.strip()
            if scanner.failed:
                return None
            if not (yield from reader.more()):
                return None

    def _arguments(self) -> Reading:
        """Read the arguments of a call that has begun, and emit them as they arrive."""
        reader, scanner = self._reader, JsonScanner()
        while True:
            text, reader.at = scanner.feed(reader.text, reader.at)
            self._fragment(text)
            if scanner.done or scanner.failed:
                return scanner.done
            if not (yield from reader.more()):
                return False

    def _announce(self, name: str, own_id: str | None) -> None:
        self._index += 1
        usable = own_id is not None and own_id.strip()
        identifier = own_id if usable else new_call_id(short=self._short_ids)
        self._emit(ToolCallDelta(self._index, identifier, name))

    def _fragment(self, text: str) -> None:
        if text:
            self._emit(ToolCallDelta(self._index, arguments=text))


class _ObjectCall:
    """A tool call while its JSON object is read.

    Arguments are held back until its name, and the identifier if the model writes one, is known.
    """

    def __init__(self, parser: CallParser, *, wait_for_id: bool) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.values = 0
        self.begun = False
        self._parser = parser
        self._held: str | None = None  # arguments read before the call could be announced
        self._wait = wait_for_id

    def read_arguments(self) -> Reading:
        parser = self._parser
        reader = parser._reader
        if not (yield from reader.space()):
            return False
        if self.name is not None and not _is_name(self.name):
            return False
        if self.name is not None and not self._wait and reader.text[reader.at] == "{":
            self._begin()
            return (yield from parser._arguments())
        value = yield from parser._value()
        if value is None:
            return False
        if value.startswith('"'):  # JSON text in JSON
            value = str(json.loads(value))
        self._held = value = "{}" if value == "null" else value
        return value.lstrip().startswith("{")

    def end(self) -> bool:
        """Announce the call if that is still to be done; False if the object is no call."""
        if self.name is None or not _is_name(self.name):
            return False
        if not self.begun:
            self._begin()
            self._parser._fragment(self._held or "{}")
        return True

    def _begin(self) -> None:
        assert self.name is not None
        self.begun = True
        self._parser._announce(self.name, self.id)


def _bare_arguments(text: str, name: str, keys: ObjectKeys) -> str | None:
    """Return the arguments (JSON) of an object that is a call and nothing else, or None.

    The grammar of calls (`tool_grammar`) holds no other objects to a tool's schema.

    Args:
        name: name of the tool.
    """
    before, behind = keys.bare(name)
    if not re.match(rf"{before}(?!\s)", text) or not re.search(rf"(?<!\s){behind}$", text):
        return None
    try:
        values = json.loads(text)
        given = [key for key in values if key in keys.argument_names]
        if len(given) != 1 or values.keys() - {keys.name, keys.id, "id", "type", *given}:
            return None
        arguments = values[given[0]]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            return None
        dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    halves = any("\ud800" <= char <= "\udfff" for char in dumped)  # of a pair, which no UTF-8 has
    return json.dumps(arguments) if halves else dumped


def new_call_id(*, short: bool = False) -> str:
    """Draw an identifier of a call: `call_` and 24 letters and digits, or 9 alone if `short`."""
    letters = string.ascii_letters + string.digits
    drawn = "".join(secrets.choice(letters) for _ in range(9 if short else 24))
    return drawn if short else f"call_{drawn}"


def _is_name(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _LONGEST_NAME and set(text) <= _NAME
