"""Typed values from JSON: settings of a config file, read or refused, and frozen dataclasses.

Python itself takes any value for any field, and fails much later or not at all: it takes JSON's
`true` for an integer, and any list of numbers for a shape. A field that may be one of several
dataclasses has the name of its class as its key.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from edgellm.errors import ModelFormatError, UnsupportedModelError

# Number of weights that are quantized together.
_GROUP = 32
# Limits far above every model. A larger number means a damaged file, and would take hours and all
# memory before anything else refuses it.
LARGEST = {
    "intermediate": 1 << 20,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "window": (1 << 31) - 1,
    "channels": 1 << 18,
    "taps": 16,
    "state_dim": 1 << 12,
    "groups": 1 << 12,
    "key_heads": 1 << 12,
    "value_heads": 1 << 12,
    "key_dim": 1 << 12,
    "value_dim": 1 << 12,
    "rank": 1 << 12,
    "query_rank": 1 << 14,
    "key": 1 << 12,
    "value": 1 << 12,
}
T = TypeVar("T")
# Parts of the names of settings that may change the results of a model.
_COMPUTES = (
    "act", "alibi", "alpha", "beta", "bias", "bidirectional", "cap", "clamp", "clip", "conv",
    "expert", "factor", "gate", "head", "layer_type", "logit", "lora", "mamba", "moe",
    "multiplier", "nextn", "norm", "parallel", "pattern", "residual", "rope", "rotary", "scal",
    "sink", "sliding", "window",
)  # fmt: skip


def check_sizes(config: object, largest: dict[str, int]) -> None:
    """Refuse fields of a config that are below 1 or above their limit.

    Args:
        largest: limit of each field.

    Raises:
        ModelFormatError: a field is out of range; the message names it.
    """
    for name, limit in largest.items():
        value = getattr(config, name, None)
        if value is not None and not 1 <= value <= limit:
            raise ModelFormatError(
                f"model config: {name} is {shown(value)}; 1 to {limit} is allowed"
            )


def check_positive(name: str, value: float | None) -> None:
    """Refuse a number of a config, if there is one, that is 0, negative, infinite or NaN.

    Raises:
        ModelFormatError: it is one of those.
    """
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ModelFormatError(f"model config: {name} is {value}; it must be positive")


def check_groups(name: str, size: int | None) -> None:
    """Refuse a width of a config, if there is one, that is no whole number of groups.

    Raises:
        UnsupportedModelError: it is no multiple of a group.
    """
    if size is not None and size % _GROUP:
        raise UnsupportedModelError(
            f"model config: {name} is {size}; weights are quantized in groups of {_GROUP}, so it "
            f"must be a multiple of {_GROUP}"
        )


def shown(value: int) -> str:
    """Return the digits of a number, or only its size in bits if it is 2^128 or more."""
    return str(value) if abs(value) < 1 << 128 else f"a number of {value.bit_length()} bits"


class Fields:
    """Typed reads from a config file: `fields.read(int, "num_attention_heads")`."""

    def __init__(self, values: Mapping[str, Any], *, origin: str, prefix: str = "") -> None:
        """Take the values of a config file.

        Args:
            origin: name of the file in errors.
            prefix: text before every key, such as `llama.` in GGUF files.
        """
        self.origin = origin
        self.prefix = prefix
        self._values = values
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the file has the key, with a value that is not null."""
        return self._values.get(self.prefix + key) is not None

    def holds(self, kind: type, key: str) -> bool:
        """Whether the value of a key has the type `kind`."""
        return isinstance(self._value(key), kind)

    def assume(self, values: Mapping[str, Any]) -> None:
        """Set defaults for keys that the file does not have. (Keys that are null stay null.)"""
        self._values = {**{self.prefix + key: v for key, v in values.items()}, **self._values}

    def read(self, kind: type[T], key: str) -> T:
        """Return the value of a required key.

        Raises:
            ModelFormatError: the key is missing or null, or its value has another type.
        """
        value = self.optional(kind, key)
        if value is None:
            raise ModelFormatError(f"{self.origin}: key {self.prefix + key!r} is missing")
        return value

    def optional(self, kind: type[T], key: str) -> T | None:
        """Return the value of a key; None where it is absent or null.

        Raises:
            ModelFormatError: the value has another type, or is a number out of range.
        """
        value = self._value(key)
        if value is None:
            return None
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ModelFormatError(
                f"{self.origin}: key {self.prefix + key!r} is {shown(value)}; a number below 2^63 "
                "is allowed"
            )
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFormatError(
                f"{self.origin}: key {self.prefix + key!r} is {value!r}; expected {kind.__name__}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelFormatError(
                f"{self.origin}: key {self.prefix + key!r} is {value!r}; expected a number"
            )
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        """Return the value of a key that must be above 0, and is required without a default.

        Raises:
            ModelFormatError: the key is missing, or its value is not above 0.
        """
        value = self.optional(float, key)
        if value is None:
            value = self.read(float, key) if default is None else default
        if value <= 0:
            raise ModelFormatError(
                f"{self.origin}: key {self.prefix + key!r} is {value}; a number above 0 is allowed"
            )
        return value

    def uniform(self, key: str, *, default: int | None = None, but_zeros: bool = False) -> int:
        """Return the value of a key that may be a list with an equal entry for every layer.

        Args:
            but_zeros: whether entries of 0 do not count.

        Raises:
            ModelFormatError: the key is missing, and there is no default.
            UnsupportedModelError: the entries differ.
        """
        value = self._value(key)
        if not isinstance(value, list):
            return self.read(int, key) if value is not None or default is None else default
        if but_zeros:
            value = [entry for entry in value if entry != 0]
        if not value or any(entry != value[0] for entry in value):
            raise UnsupportedModelError(
                f"{self.origin}: {self.prefix}{key} = {value!r} is not supported; supported is "
                "the same in all layers"
            )
        return Fields({key: value[0]}, origin=self.origin).read(int, key)

    def entries(self, kind: type[T], key: str, count: int) -> list[T] | None:
        """Return the list of a key with one entry for every layer; None where it is absent.

        Args:
            count: number of layers.

        Raises:
            ModelFormatError: the number of entries differs, or an entry has another type.
        """
        values = self.optional(list, key)
        if values is None:
            return None
        if len(values) != count:
            raise ModelFormatError(
                f"{self.origin}: key {self.prefix + key!r} has {len(values)} entries, and the "
                f"model has {count} layers"
            )
        for value in values:
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ModelFormatError(
                    f"{self.origin}: key {self.prefix + key!r} holds {value!r}; expected "
                    f"{kind.__name__}"
                )
        return values

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a value of a key that is not computed here; absent keys and null are allowed.

        Raises:
            UnsupportedModelError: the value is not among `allowed`.
        """
        value = self._value(key)
        if value is not None and value not in allowed:
            names = " or ".join(repr(a) for a in allowed)
            raise UnsupportedModelError(
                f"{self.origin}: {self.prefix}{key} = {value!r} is not supported; supported is "
                + (names or "a model without it")
            )

    def ignore(self, *keys: str) -> None:
        """Mark keys as read, since they are known and nothing here depends on them."""
        self._read.update(self.prefix + key for key in keys)

    def refuse_unread(
        self, *, harmless: Collection[str] = (), usual: Collection[tuple[str, object]] = ()
    ) -> None:
        """Refuse unread settings whose names suggest that they change the model's results.

        Settings that are null, false, 0 or empty are never refused.

        Args:
            harmless: keys that are known to change nothing, whatever their value.
            usual: pairs of a list's key and an entry that stands for the usual layer; a list of
                such entries is not refused.

        Raises:
            UnsupportedModelError: there is such a setting; the message names the first one.
        """
        for key, value in self._values.items():
            name = key.removeprefix(self.prefix)
            if not key.startswith(self.prefix) or key in self._read or name in harmless:
                continue
            if isinstance(value, list) and all((name, entry) in usual for entry in value):
                continue
            if value and any(word in name for word in _COMPUTES):
                raise UnsupportedModelError(
                    f"{self.origin}: {key} = {reprlib.repr(value)} is not understood, and leaving "
                    "it out could change what the model computes"
                )

    def _value(self, key: str) -> Any:
        self._read.add(self.prefix + key)
        return self._values.get(self.prefix + key)


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
    keys = [key for kinds, _ in known.values() for key in kinds]
    unknown = sorted(value.keys() - set(keys))
    if unknown:
        raise ModelFormatError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(keys)}")
    parsed = {}
    for name, (kinds, required) in known.items():
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
    origin, arguments = _parts(kind)
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
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@cache
def _fields(kind: Any) -> dict[str, tuple[dict[str, Any], bool]]:
    """Map each field of a dataclass to its keys, see `_keys`, and to whether it has no default."""
    hints = get_type_hints(kind)
    return {
        field.name: (
            _keys(field.name, hints[field.name]),
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
