"""Fields of a JSON object in a request, read with a check of their types.

A field that is null counts as missing. Fields that no handler reads are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.serve.request_error import RequestError

MAX_STOPS = 64
# OpenAI allows 300. Each bias is checked in the event loop, and added at each token.
MAX_BIASES = 1024
_JSON = json.JSONEncoder(ensure_ascii=False)


class Fields:
    """Fields of a JSON object, read by type.

    For a missing field each method returns None, or an empty list. A value of another type than
    expected raises `RequestError`.

    Args:
        where: path to the object, put before field names in errors, such as `messages[0].`.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the value of a field, of any type; None if it is missing."""
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def required_text(self, name: str) -> str:
        text: str = self.required(name, self.text(name))
        return text

    def required(self, name: str, value: Any) -> Any:
        """Return the value of a field, and refuse None as a missing field."""
        if value is None:
            raise RequestError(
                "invalid_request", f"`{self.where}{name}` is missing", param=self.where + name
            )
        return value

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JavaScript has one type of numbers
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.wrong(name, f"one of {', '.join(allowed)}")
        return value if value is None else str(value)

    def texts(self, name: str, most: int) -> list[str]:
        """Read a field that is a string, or a list of at most `most` strings, as a list."""
        value = self.get(name)
        if value is None:
            return []
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > most:
            raise self.wrong(name, f"a string, or a list of at most {most}")
        if not all(isinstance(text, str) for text in texts):
            raise self.wrong(name, "a string, or a list of strings")
        return texts

    def object(self, name: str) -> Fields | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.where}{name}.")

    def required_object(self, name: str) -> Fields:
        fields: Fields = self.required(name, self.object(name))
        return fields

    def object_text(self, name: str) -> str:
        """Read an object as its JSON; an empty one if it is missing."""
        return _JSON.encode(self.values.get(name) if self.object(name) else {})

    def objects(self, name: str, most: int) -> list[Fields]:
        """Read a field that is a list of at most `most` objects."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(name, f"a list of at most {most} objects")
        if not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, "a list of objects")
        return [Fields(item, f"{self.where}{name}[{i}].") for i, item in enumerate(value)]

    def wrong(self, name: str, allowed: str) -> RequestError:
        """Return the error of a field whose value is not allowed."""
        return RequestError(
            "invalid_request",
            f"`{self.where}{name}` is {shown(self.get(name))}; allowed is {allowed}",
            param=self.where + name,
        )


def shown(value: Any) -> str:
    """Return a value as JSON of at most 60 characters, without serializing all of a large one."""
    text = ""
    if isinstance(value, str):
        value = value[:60]  # still more than 60 with its quotes, if it was cut
    for part in _JSON.iterencode(value):
        text += part
        if len(text) > 60:
            return f"{text[:57]}..."
    return text
