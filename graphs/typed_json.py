"""JSON values as frozen dataclasses, with the type of every field checked.

Python itself takes any value for any field, and fails much later or not at all: it takes JSON's
`true` for an integer, and any list of numbers for a shape. A field that may be one of several
dataclasses has the name of its class as its key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from edgellm.errors import ModelFormatError

T = TypeVar("T")
_NAMES = {int: "an integer", float: "a finite number", str: "text", bool: "true or false"}


def parse(kind: type[T], value: Any, *, where: str) -> T:
    """Make an instance of the dataclass `kind` from a JSON object.

    Args:
        where: name of the value in errors, such as `manifest.json: config`.

    Raises:
        ModelFormatError: a field is missing, unknown or of another type.
    """
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    dataclass: Any = kind  # mypy: a type variable is not hashable
    known = _fields(dataclass)
    keys = [key for name, (hint, _) in known.items() for key in _keys(name, hint)]
    unknown = sorted(value.keys() - set(keys))
    if unknown:
        raise ModelFormatError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(keys)}")
    parsed = {}
    for name, (hint, required) in known.items():
        kinds = _keys(name, hint)
        there = [key for key in kinds if key in value]
        if len(there) > 1:
            raise ModelFormatError(f"{where}: keys {' and '.join(there)} exclude each other")
        for key in there:
            parsed[name] = typed(kinds[key], value[key], where=f"{where}.{key}")
        if required and not there:
            raise ModelFormatError(f"{where}: key {' or '.join(map(repr, kinds))} is missing")
    return kind(**parsed)


def key_of(kind: type) -> str:
    """Return the key of a field that may be one of several dataclasses: `ShortConv`: short_conv."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def _keys(name: str, hint: Any) -> dict[str, Any]:
    """Map the keys that a field may have to types: its name, or one for each of its dataclasses."""
    kinds = [each for each in get_args(hint) if isinstance(each, type) and is_dataclass(each)]
    if get_origin(hint) is not UnionType or len(kinds) < 2:
        return {name: hint}
    return {key_of(each): each for each in kinds}


def typed(kind: Any, value: Any, *, where: str) -> Any:
    """Convert a JSON value to a Python type: a scalar, union, tuple, mapping or dataclass.

    Raises:
        ModelFormatError: the value has another type, or is a number out of range.
    """
    if kind is Any:
        return value
    if kind in _NAMES:
        return _scalar(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        if value is None and NoneType in arguments:
            return None
        (kind,) = (part for part in arguments if part is not NoneType)
        return typed(kind, value, where=where)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise _wrong(where, value, " or ".join(map(repr, arguments)))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(where, value, "a list")
        return tuple(typed(arguments[0], v, where=f"{where}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        return {key: typed(arguments[1], v, where=f"{where}.{key}") for key, v in value.items()}
    return parse(kind, value, where=where)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Map each field of a dataclass to its type, and to whether it has no default."""
    hints = get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)
    }


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 63 else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(where, value, _NAMES[kind])
    if kind is float and not math.isfinite(value):
        raise _wrong(where, value, _NAMES[kind])
    return value


def _wrong(where: str, value: Any, expected: str) -> ModelFormatError:
    shown = repr(value) if not isinstance(value, int) or abs(value) < 1 << 63 else "a huge number"
    if len(shown) > 80:
        shown = f"{shown[:80]} ..."
    return ModelFormatError(f"{where} is {shown}; expected {expected}")
