"""Bodies of requests: read within limits, and their fields by type.

A field that is null is as one that is not there; fields that nobody asks for are ignored.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

from edgellm.serve.request_error import RequestError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
MAX_DEPTH = 64
MAX_STOPS = 64
# Parsing less than this takes less than 3 ms.
_LARGE = 1 << 18
_JSON = json.JSONEncoder(ensure_ascii=False)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class ClientGoneError(Exception):
    """The client closed its connection."""


async def read_body(receive: Receive, *, limit: int, timeout_s: float) -> bytes:
    """The body of a request.

    Raises:
        RequestError: it is too large, or too slow.
        ClientGoneError: it did not come to its end.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise RequestError(
            "timeout", f"the body did not come within {timeout_s:g} seconds"
        ) from None


def too_large(limit: int) -> RequestError:
    return RequestError("too_large", f"the body has more than {limit} bytes, which are allowed")


async def read_fields(body: bytes) -> Fields:
    """The fields of a body, which is a JSON object.

    Raises:
        RequestError: it is not, or is nested too deep, or has a key twice.
    """
    if len(body) > _LARGE:
        return await asyncio.to_thread(parse_fields, body)
    return parse_fields(body)


def parse_fields(body: bytes) -> Fields:
    """See `read_fields`."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "invalid_request", f"the body is not UTF-8 at byte {error.start}"
        ) from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise RequestError("invalid_request", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # a number of thousands of digits
        raise RequestError("invalid_request", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("invalid_request", "the body is no JSON object")
    _check_tree(value, texts=_SURROGATE.search(text) is not None)
    return Fields(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RequestError("invalid_request", f"the body has the key {key[:60]!r} twice")
            seen.add(key)
    return values


def _constant(name: str) -> NoReturn:
    raise RequestError("invalid_request", f"the body has {name}, which is no number of JSON")


def _too_deep() -> RequestError:
    return RequestError("invalid_request", f"the body is nested more than {MAX_DEPTH} levels deep")


def _check_tree(value: Any, *, texts: bool) -> None:
    """Refuse deep nesting and, among `texts`, half of a character."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        if texts:
            for text in _texts(level):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise RequestError(
                        "invalid_request", "a text of the body is not valid Unicode"
                    ) from None
        level = [child for each in level for child in _children(each)]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _texts(values: Sequence[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value


class Fields:
    """The fields of a JSON object, by type.

    Each method gives None, or an empty list, for a field that is not there.

    Args:
        where: what stands before the fields' names in errors, as `messages[0].`.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """Whatever it is."""
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
        """A value that has to be there."""
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
            value = int(value)  # JavaScript's are all the same
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
        """A string, or a list of strings."""
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

    def objects(self, name: str, most: int) -> list[Fields]:
        """A list of objects."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(name, f"a list of at most {most} objects")
        if not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, "a list of objects")
        return [Fields(item, f"{self.where}{name}[{i}].") for i, item in enumerate(value)]

    def wrong(self, name: str, allowed: str) -> RequestError:
        """The error of a field that is something else."""
        return RequestError(
            "invalid_request",
            f"`{self.where}{name}` is {shown(self.get(name))}; allowed is {allowed}",
            param=self.where + name,
        )


def shown(value: Any) -> str:
    """A value of a request as JSON, at most 60 characters; of a large one no more is written."""
    text = ""
    if isinstance(value, str):
        value = value[:60]  # its quotes make it longer than that
    for part in _JSON.iterencode(value):
        text += part
        if len(text) > 60:
            return f"{text[:57]}..."
    return text
