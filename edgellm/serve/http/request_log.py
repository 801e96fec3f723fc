"""Request log: a line for each request, with its client, path, end and its answers' counts.

No text of a prompt or an answer is logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from edgellm.serve.http.body import Receive
from edgellm.serve.http.endpoint import ANSWERED, AnswerNote, Scope
from edgellm.serve.http.guard import ASGI
from edgellm.serve.http.streaming import Send

log = logging.getLogger("edgellm.requests")
# Paths that monitors ask for every few seconds; these requests are logged only when they fail.
_QUIET = ("/health", "/v1/health", "/metrics")
# The reason why no more was cached, by `Stats.cache_end`; "whole" and "new" explain themselves.
_CACHE_ENDS = {
    "whole": "",
    "new": "",
    "differs": " (cached prompts differ from there on)",
    "reused": " (the rest was given up for other prompts)",
    "scored": " (the rest is scored)",
}


@dataclass
class _Outcome:
    """Status and end of a reply.

    Attributes:
        status: HTTP status; 0 before the reply has begun.
        end: way in which the reply ended; "failed": by an unexpected exception.
    """

    status: int = 0
    end: Literal["whole", "cut off", "client gone", "failed"] = "cut off"


class RequestLog:
    """ASGI middleware around the guard that logs a line for each request, at level INFO."""

    def __init__(self, app: ASGI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            return await self._app(scope, receive, send)
        start = time.perf_counter()
        answered: list[AnswerNote] = []
        scope[ANSWERED] = answered
        outcome = _Outcome()

        async def receiving() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "http.disconnect" and outcome.end != "whole":
                outcome.end = "client gone"
            return message

        async def sending(message: MutableMapping[str, Any]) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
            elif not message.get("more_body", False):
                outcome.end = "whole"

        try:
            await self._app(scope, receiving, sending)
        except Exception:
            outcome.end = "failed"
            raise
        finally:
            good = outcome.end == "whole" and outcome.status < 400
            if not (good and scope["path"] in _QUIET):
                seconds = time.perf_counter() - start
                log.info("%s", _line(scope, outcome, seconds, answered))


def _line(scope: Scope, outcome: _Outcome, seconds: float, answered: Sequence[AnswerNote]) -> str:
    address = (scope.get("client") or ("-",))[0]
    # quoted: a line break in the path would look like another request
    path = quote(scope["path"], safe="/:@+=~", errors="replace")[:200]
    end = "" if outcome.end == "whole" else f" {outcome.end}"
    request = f"{address} {scope['method'][:16]} {path} {outcome.status or '-'}{end}"
    return "; ".join([f"{request} {seconds:.3f} s", *map(_told, answered)])


def _told(note: AnswerNote) -> str:
    told = f"{note.model}: {note.prompt_tokens} prompt tokens, "
    stats = note.stats
    if stats is not None:
        told += (
            f"{stats.cached_tokens} of them cached{_CACHE_ENDS[stats.cache_end]}, "
            f"{stats.generation_tokens} generated, {stats.ttft_s:.3f} s to the first, "
            f"then {stats.generation_tokens_per_second:.1f}/s, "
        )
    return told + note.end
