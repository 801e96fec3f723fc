"""Request bodies, read within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from edgellm.serve.request_error import RequestError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGoneError(Exception):
    """The client closed its connection."""


async def read_body(receive: Receive, *, limit: int, timeout_s: float) -> bytes:
    """Read the body of a request.

    Raises:
        RequestError: the body has more than `limit` bytes, or takes longer than `timeout_s`.
        ClientGoneError: the client disconnected before the end of the body.
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
