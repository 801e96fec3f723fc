"""Typed reads from a config file, and refusal of settings that were not read."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from edgellm.errors import ModelFormatError, UnsupportedModelError

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
