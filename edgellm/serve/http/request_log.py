"""A line of the log for each request: who asked for what, how it ended, and what its answers took.

Nothing of a prompt or an answer is in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping, Sequence
from typing import Any
from urllib.parse import quote

from edgellm.results import FinishReason, Stats
from edgellm.serve.http.body import Receive
from edgellm.serve.http.endpoint import ANSWERED, LoggedAnswer, Scope
from edgellm.serve.http.guard import ASGI
from edgellm.serve.http.streaming import Send

log = logging.getLogger("edgellm.requests")
# What monitors ask for every few seconds; told only when it fails.
_QUIET = ("/health", "/v1/health", "/metrics")


class RequestLog:
    """ASGI middleware around all other; lines have the level INFO."""

    def __init__(self, app: ASGI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            return await self._app(scope, receive, send)
        start = time.perf_counter()
        answered: list[LoggedAnswer] = []
        scope[ANSWERED] = answered
        status, whole = 0, False

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status, whole
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                whole = not message.get("more_body", False)

        try:
            await self._app(scope, receive, noting)
        finally:
            if status >= 400 or not whole or scope["path"] not in _QUIET:
                seconds = time.perf_counter() - start
                log.info("%s", _line(scope, status, whole, seconds, answered))


def _line(
    scope: Scope, status: int, whole: bool, seconds: float, answered: Sequence[LoggedAnswer]
) -> str:
    address = (scope.get("client") or ("-",))[0]
    # quoted: a line break in a path would look like another request
    path = quote(scope["path"], safe="/:@+=~")[:200]
    end = str(status) if whole else f"{status or '-'} client gone"
    parts = [f"{address} {scope['method']} {path} {end} {seconds:.3f} s"]
    parts += [_told(model, reason, stats) for model, reason, stats in answered]
    return "; ".join(parts)


def _told(model: str, reason: FinishReason, stats: Stats) -> str:
    return (
        f"{model}: {stats.prompt_tokens} prompt tokens, {stats.cached_tokens} of them cached, "
        f"{stats.generation_tokens} generated, {stats.ttft_s:.3f} s to the first, then "
        f"{stats.generation_tokens_per_second:.1f}/s, {reason}"
    )
