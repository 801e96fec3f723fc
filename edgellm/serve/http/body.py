"""Request bodies: limits of size and time, and JSON objects within limits of depth and content."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any, NoReturn

from edgellm.serve.http.fields import Fields
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
MAX_DEPTH = 64
# Limits of all values, and of lists and objects among them. `json.loads` blocks all other threads,
# and with them the streams: for 0.08 s at these limits; 15 MB can hold enough values for 2 s.
MAX_VALUES = (1 << 20) + (1 << 16)  # 1 Mi token ids, and the fields around them
MAX_CONTAINERS = 1 << 17
# Bytes; a smaller body is parsed in less than 3 ms.
_LARGE = 1 << 18
_PART = 1 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class ClientGoneError(Exception):
    """The client closed its connection."""


async def read_body(receive: Receive, options: ServeOptions) -> bytes:
    """Read the body of a request.

    Raises:
        RequestError: the body has more than `max_body_bytes`, or takes longer than
            `read_timeout_s`.
        ClientGoneError: the client disconnected before the end of the body.
    """
    limit, timeout_s = options.max_body_bytes, options.read_timeout_s
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
    """Parse a body that is a JSON object, in a thread if it is large.

    Raises:
        RequestError: the body is no JSON object, has too many values, is nested too deep, has a
            key twice, or is not valid Unicode.
    """
    if len(body) > _LARGE:
        return await asyncio.to_thread(parse_fields, body)
    return parse_fields(body)


def parse_fields(body: bytes) -> Fields:
    """Parse a body in the calling thread; see `read_fields`."""
    if len(body) > _LARGE:
        _check_count(body)
    mark = len(BOM_UTF8) if body.startswith(BOM_UTF8) else 0  # some Windows tools write one
    try:
        text = body[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "invalid_request", f"the body is not UTF-8 at byte {mark + error.start}"
        ) from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise RequestError("invalid_request", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise RequestError(
            "invalid_request",
            f"the body has a whole number of more than {sys.get_int_max_str_digits()} digits",
        ) from None
    if not isinstance(value, dict):
        raise RequestError("invalid_request", "the body is no JSON object")
    _check_tree(value, texts=_SURROGATE.search(text) is not None)
    return Fields(value)


def _check_count(body: bytes) -> None:
    """Refuse a body with too many values, before it is parsed.

    Commas and brackets are counted first in the whole body. Only if they are too many, which is
    rare, are they counted again without those inside strings.

    Raises:
        RequestError: the body has too many values.
    """
    if _fits(*_counted(body)):
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    containers = commas = 0
    outside = True
    for start in range(0, len(unescaped), _PART):
        parts = unescaped[start : start + _PART].split(b'"')
        more = _counted(b"".join(parts[not outside :: 2]))
        containers, commas = containers + more[0], commas + more[1]
        if not _fits(containers, commas):
            raise RequestError(
                "invalid_request",
                f"the body has more than the {MAX_VALUES} values, {MAX_CONTAINERS} of them lists "
                "and objects, that are allowed; send less at once",
            )
        outside ^= len(parts) % 2 == 0


def _counted(data: bytes) -> tuple[int, int]:
    """Count the opening brackets (lists and objects), and the commas, in `data`."""
    return data.count(b"[") + data.count(b"{"), data.count(b",")


def _fits(containers: int, commas: int) -> bool:
    return containers <= MAX_CONTAINERS and containers + commas <= MAX_VALUES


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
    """Refuse nesting beyond `MAX_DEPTH` levels and, with `texts`, lone surrogates in strings."""
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
