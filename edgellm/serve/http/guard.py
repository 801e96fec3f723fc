"""Around all routes: access control before any work, and a line in the log for each request.

A loopback address is no trust boundary: web pages that a user looks at can send requests to it. So
a name in `Host` that is not this machine's (DNS rebinding), a foreign `Origin` and a cross-site
request of a browser are refused. A browser's POST has to declare JSON, which no page may send to
another site without a preflight request. No text of a prompt or an answer is logged.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from edgellm.serve.events import Client
from edgellm.serve.http.body import Receive, too_large
from edgellm.serve.http.endpoint import ANSWERED, CLIENT, AnswerNote, Scope
from edgellm.serve.http.streaming import BodyReply, Reply, Send
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError

ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]
# Paths that need no key: the health check, and the chat page, which asks its user for a key.
PUBLIC = ("/", "/health", "/v1/health")
# Names of this machine in containers. Any network can answer for these names, so they are allowed
# only for programs, which send no `Origin`.
_IN_CONTAINERS = ("host.docker.internal", "host.containers.internal")
# URL schemes of pages in installed programs; no page that comes over a network has them.
_PROGRAM_SCHEMES = ("app", "tauri", "vscode-file", "vscode-webview")
_HEADERS = "Authorization, Content-Type, X-Api-Key"
_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
    "access-control-max-age": "600",
}


class Guard:
    """ASGI middleware around the application: checks hosts, origins and keys, and answers CORS.

    Args:
        error: function that returns the reply for an error at a path, in the path's dialect.
    """

    def __init__(
        self, app: ASGI, options: ServeOptions, error: Callable[[str, RequestError], Reply]
    ) -> None:
        self._app = app
        self._options = options
        self._error = error
        self._digests = [_digest(key) for key in options.api_keys]
        name = socket.gethostname().lower()
        mdns = f"{name.partition('.')[0]}.local"
        self._own_names = ("localhost", name, mdns, *options.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {key.decode("latin-1"): v.decode("latin-1") for key, v in scope["headers"]}
        origin = headers.get("origin")
        shared = self._cors(origin)
        asked = headers.get("access-control-request-headers", "")

        async def sending(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start" and shared:
                pairs = [(name.encode(), value.encode()) for name, value in shared.items()]
                message["headers"] = [*message["headers"], *pairs]  # type: ignore[misc]
            await send(message)

        reply: Reply
        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS" and shared:
                reply = BodyReply(b"", "text/plain", 204, _preflight(asked))
            else:
                scope[CLIENT] = self._client(scope, headers)
                return await self._app(scope, receive, sending)  # type: ignore[arg-type]
        except RequestError as error:
            reply = self._error(scope["path"], error)
        await reply.send(sending)  # type: ignore[arg-type]

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        options = self._options
        host, origin = headers.get("host", ""), headers.get("origin")
        is_own = self._is_own(host) or (origin is None and _host_name(host) in _IN_CONTAINERS)
        if options.is_local and not options.is_socket and not is_own:
            raise RequestError(
                "permission",
                f"the Host {host[:100]!r} is not this machine; `--allow-host` allows it",
            )
        if origin is not None and not (self._may_read(origin) or self._is_same(origin, host)):
            raise RequestError(
                "permission",
                f"pages of {origin[:100]!r} may not call this server; `--allow-origin` allows it",
            )
        site = headers.get("sec-fetch-site")
        page = scope["path"] in PUBLIC and scope["method"] in ("GET", "HEAD")
        if site == "cross-site" and origin is None and not page:
            raise RequestError("permission", "other sites may not call this server")
        if scope["method"] == "POST" and (origin is not None or site is not None):
            media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise RequestError("media_type", "a browser has to send application/json")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError("media_type", "the body must not be compressed")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > options.max_body_bytes:
            raise too_large(options.max_body_bytes)

    def _is_own(self, host: str) -> bool:
        """Whether a `Host` header has a name of this machine, or a loopback or private address."""
        name = _host_name(host)
        if name in self._own_names or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or address.is_private

    def _may_read(self, origin: str) -> bool:
        """Whether pages of an origin may read answers: local pages and allowed origins."""
        return origin in self._options.allowed_origins or _is_local_origin(origin)

    def _is_same(self, origin: str, host: str) -> bool:
        """Whether an origin is this server itself.

        A `Host` that is not this machine's proves nothing, even where it is not checked otherwise:
        a page whose name was made to point here (DNS rebinding) sends that name in both headers.
        """
        return origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower()) and (
            self._is_own(host)
        )

    def _cors(self, origin: str | None) -> dict[str, str]:
        """Return the CORS headers that let a page read the answer; none if it may not."""
        if origin is None or not self._may_read(origin):
            return {}
        return {"access-control-allow-origin": origin, "vary": "Origin"}

    def _client(self, scope: Scope, headers: Mapping[str, str]) -> Client:
        """Return the client of a request, told by its API key.

        With several keys, its salt and owner are the key's SHA-256; else they are empty.

        Raises:
            RequestError: a key is needed, and is missing or wrong.
        """
        public = scope["path"] in PUBLIC and scope["method"] in ("GET", "HEAD")
        if not self._digests or public:
            return Client()
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        given = given or headers.get("x-api-key", "")
        digest = _digest(given)
        # compared with all keys, so that the time does not tell how near the key is to one
        matches = [known for known in self._digests if hmac.compare_digest(known, digest)]
        if not given or not matches:
            raise RequestError(
                "authentication",
                "an API key is needed, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
                if not given
                else "the API key is wrong",
                code="invalid_api_key",
            )
        name = matches[0].hex() if len(self._digests) > 1 else ""
        return Client(salt=name, owner=name)


def _preflight(asked: str) -> dict[str, str]:
    """Return CORS preflight headers, which allow all asked headers: clients often add new ones."""
    names = asked if asked.isascii() and asked.isprintable() else ""
    return {**_PREFLIGHT, "access-control-allow-headers": names or _HEADERS}


def _digest(key: str) -> bytes:
    """Return the SHA-256 of a key, so that all compared values have one length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host_name(host: str) -> str:
    """Take the host name out of a `Host` header; "" if the header is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower().rstrip(".")
    except ValueError:
        return ""


def _is_local_origin(origin: str) -> bool:
    """Whether an origin is a local page or an installed program of this machine."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme in _PROGRAM_SCHEMES:
        return True
    return parts.scheme in ("http", "https") and (
        host in ("localhost", "127.0.0.1", "::1") or host.endswith(".localhost")
    )


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
