"""The shape of a rendered tool call: JSON object, JSON after the name, tags, ... Pure Python."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgellm.text.tool_format import (
    ID_SLOT,
    INDEX_SLOT,
    KEY_SLOT,
    NAME_SLOT,
    TYPE_SLOT,
    CallFormat,
    Kind,
    ObjectKeys,
    ParameterTags,
)

Call = Mapping[str, Any]
_DECODER = json.JSONDecoder()
_INDEX = re.compile(r"(?<![\w.])\d+(?![\w.])")


class NotUnderstood(Exception):
    """Error: the template writes calls in a way that is not supported; the message tells which."""


@dataclass(frozen=True)
class Unit:
    """Place of a call in a text.

    Attributes:
        begin: offset of the call's name, or of its object.
        end: offset of the end of its arguments, or of its object.
    """

    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """The form of a template's calls, without the markers around them; see `CallFormat`."""

    kind: Kind
    middle: str = ""
    keys: ObjectKeys | None = None
    tags: ParameterTags | None = None
    quote: str = ""

    def unit_of(self, text: str, call: Call) -> Unit | None:
        """Find the place of a call in a rendered text; None if it is not there or has no end."""
        if self.kind == "object":
            around = _object_around(text, call)
            return None if around is None else Unit(around[0], around[1])
        name = text.find(call["name"])
        if name < 0:
            return None
        if self.kind == "json":
            arguments = _json_arguments(text, name, call)
            return None if arguments is None else Unit(name, arguments[1])
        if self.kind == "tagged":
            value = _last_value(text, name, call)
            return None if value < 0 else Unit(name, value)
        end = _call_end(text, name + len(call["name"]), self.quote or "'")
        return None if end < 0 else Unit(name, end)

    def with_slots(self, text: str, call: Call) -> str:
        """Return a marker with slots in place of the call's identifier and name."""
        text = text.replace(call["id"], ID_SLOT)
        return text if self.kind == "object" else text.replace(call["name"], NAME_SLOT)

    def form(self, one: str, two: str | None) -> CallFormat:
        """Build the call format from renderings.

        Args:
            one: rendering of one call.
            two: rendering of two calls, or None if the template refuses two.

        Raises:
            NotUnderstood: a call has no end, its last argument ends unlike the others, or two calls
                are not written one after the other.
        """
        call, other = probe_call(1), probe_call(2)
        unit = self.unit_of(one, call)
        if unit is None:
            raise NotUnderstood("a call has no end")
        before = self.with_slots(one[: unit.begin], call)
        form = CallFormat(
            kind=self.kind,
            open=before,
            middle=self.middle,
            close=self.with_slots(one[unit.end :], call),
            keys=self.keys,
            tags=self.tags,
            quote=self.quote,
            parallel=False,
        )
        if two is None or other["name"] not in two:
            return self._tagged_form(form)
        first, second = self.unit_of(two, call), self.unit_of(two, other)
        if first is None or second is None or second.begin < first.end:
            raise NotUnderstood("two calls are not written one after the other")
        between = self.with_slots(two[first.end : second.begin], other)
        behind = self.with_slots(two[second.end :], other)
        opened = common_end(before, between)
        rest = between.removesuffix(opened)
        closed = common_head(behind, rest)
        form = replace(
            form,
            section=before.removesuffix(opened),
            open=opened,
            close=closed,
            between=rest.removeprefix(closed),
            section_close=behind.removeprefix(closed),
            parallel=True,
        )
        return self._tagged_form(form)

    def _tagged_form(self, form: CallFormat) -> CallFormat:
        """Return a format whose `close` does not begin with the last argument's end marker."""
        if self.tags is None:
            return form
        close = form.close
        value_close = self.tags.value_close.replace(KEY_SLOT, "edgekey2")
        if not close.startswith(value_close.rstrip()):
            raise NotUnderstood("the end of a call's last argument differs from the others'")
        if not close.startswith(value_close):
            value_close = value_close.rstrip()
        return replace(form, close=close.removeprefix(value_close))


def probe_call(number: int, **arguments: Any) -> Call:
    """Make a call whose name, identifier and arguments occur in no template."""
    values = arguments or {"edgekey1": "edgevalue1", "edgekey2": "edgevalue2"}
    return {"id": f"edgeId{number:03}", "name": f"edgename{number}", "arguments": values}


def find_shape(text: str, typed: str, call: Call) -> CallShape:
    """Find the shape of a rendered call.

    Args:
        text: rendering of `call`, whose two arguments are texts.
        typed: the same with the number 7 as the first argument; "" if not known.

    Raises:
        NotUnderstood: the shape is not supported.
    """
    if call["name"] not in text:
        raise NotUnderstood("the chat template does not render a call's name as it is")
    around = _object_around(text, call)
    if around is not None:
        return CallShape(kind="object", keys=_object_keys(around[2], call))
    name = text.find(call["name"])
    arguments = _json_arguments(text, name, call)
    if arguments is not None:
        middle = text[name + len(call["name"]) : arguments[0]]
        return CallShape(kind="json", middle=_middle(middle, call))
    behind = text[name + len(call["name"]) :]
    if re.match(r"\(edgekey1=(['\"])edgevalue1\1, ?edgekey2=", behind):
        return CallShape(kind="python")
    braces = re.match(r"\{edgekey1:(.+?)edgevalue1\1,edgekey2:\1edgevalue2\1\}", behind)
    if braces is not None:
        return CallShape(kind="braces", quote=braces[1])
    return _tagged_shape(text, typed, name, call)


def _tagged_shape(text: str, typed: str, name: int, call: Call) -> CallShape:
    places = [text.find(t, name) for t in ("edgekey1", "edgevalue1", "edgekey2", "edgevalue2")]
    if -1 in places or places != sorted(places):
        raise NotUnderstood("a call's arguments are not written as JSON, nor one after the other")
    key1, value1, key2, value2 = places
    to_key = text[name + len(call["name"]) : key1]
    to_value = text[key1 + 8 : value1]
    between = text[value1 + 10 : key2].replace("edgekey1", KEY_SLOT)
    to_end = text[value2 + 10 :].replace("edgekey2", KEY_SLOT)
    key_open = common_end(to_key, between)
    value_close = common_head(to_end, between.removesuffix(key_open))
    if not (key_open.strip() and to_value.strip() and value_close.strip()):
        raise NotUnderstood("nothing marks where an argument begins or ends")
    texts: tuple[str, ...] = (to_value,)
    if to_value.endswith('"') and value_close.startswith('"'):  # every value is JSON
        texts, to_value, value_close = (), to_value[:-1], value_close[1:]
    number = re.search(rf"edgekey1((?:(?!edge).)*?)7{re.escape(value_close[:1])}", typed, re.DOTALL)
    values: tuple[str, ...] = (to_value if number is None else number[1],)
    if texts and values != texts:
        values = (*values, _any_type(texts[0], values[0]))
    tags = ParameterTags(key_open=key_open, texts=texts, values=values, value_close=value_close)
    return CallShape(kind="tagged", middle=_middle(to_key.removesuffix(key_open), call), tags=tags)


def _any_type(text: str, value: str) -> str:
    """Merge two markers that name the type of an argument into one with a slot for the type."""
    differing = [i for i, (a, b) in enumerate(zip(text, value, strict=False)) if a != b]
    quoted = text.index('"', differing[0]) if differing and '"' in text[differing[0] :] else -1
    if quoted < 0:
        raise NotUnderstood("the marker between an argument's key and its value is not clear")
    return f"{text[: differing[0]]}{TYPE_SLOT}{text[quoted:]}"


def _object_around(text: str, call: Call) -> tuple[int, int, dict[str, Any]] | None:
    """Find the smallest JSON object with a call's name and arguments: begin, end and value."""
    name = text.find(f'"{call["name"]}"')
    at = text.rfind("{", 0, max(name, 0))
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = None, 0
        if isinstance(value, dict) and end > name:
            named = call["name"] in value.values() and call["arguments"] in value.values()
            if named or value == {call["name"]: call["arguments"]}:
                return at, end, value
        at = text.rfind("{", 0, at) if at else -1
    return None


def _object_keys(value: Mapping[str, Any], call: Call) -> ObjectKeys:
    if call["name"] in value:
        return ObjectKeys(name=None, arguments=None)
    keys = list(value)
    by_value = {
        what: next((key for key in keys if value[key] == call[what]), None)
        for what in ("name", "arguments", "id")
    }
    known = by_value.values()
    identifier, arguments = by_value["id"], by_value["arguments"]
    last = identifier is not None and keys.index(identifier) > keys.index(arguments or "")
    others = tuple(key for key in keys if key not in known)
    return ObjectKeys(
        name=by_value["name"], arguments=arguments, id=identifier, id_last=last, others=others
    )


def _json_arguments(text: str, name: int, call: Call) -> tuple[int, int] | None:
    """Find the JSON of the arguments after a call's name: begin and end."""
    at = text.find("{", name)
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = None, 0
        if value == call["arguments"]:
            return at, end
        at = text.find("{", at + 1)
    return None


def _middle(text: str, call: Call) -> str:
    """Return the text between a call's name and its arguments, with slots."""
    text = text.replace(call["id"], ID_SLOT).replace(call["name"], NAME_SLOT)
    return _INDEX.sub(INDEX_SLOT, text)


def _last_value(text: str, name: int, call: Call) -> int:
    """Return the offset of the end of the last argument's value; negative without one."""
    value = str(list(call["arguments"].values())[-1])
    at = text.find(value, name)
    return at if at < 0 else at + len(value)


def _call_end(text: str, at: int, quote: str) -> int:
    closer = {"(": ")", "{": "}"}.get(text[at : at + 1], "")
    end = text.find(closer, text.find("edgevalue2", at)) if closer else -1
    return end if end < 0 else end + 1


# Units of comparison: tags, Mistral's names in brackets, and single characters.
_SEGMENT = re.compile(r"<[^<>\s][^<>]*>?|\[/?[A-Z_]+\]|.", re.DOTALL)


def segments(text: str) -> list[str]:
    """Split a text into tags and single characters."""
    return _SEGMENT.findall(text)


def common_head(a: str, b: str) -> str:
    """Return the common beginning of two texts, in whole tags."""
    return "".join(_common(segments(a), segments(b)))


def common_end(a: str, b: str) -> str:
    """Return the common end of two texts, in whole tags."""
    return "".join(_common(segments(a)[::-1], segments(b)[::-1])[::-1])


def _common(a: Sequence[str], b: Sequence[str]) -> Sequence[str]:
    pairs = zip(a, b, strict=False)
    return a[: next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))]
