"""The ASGI application: the routes of all API dialects, and the chat page, behind one guard."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from edgellm.serve.answering import Answering, BringPrefix
from edgellm.serve.anthropic.routes import ANTHROPIC
from edgellm.serve.http.endpoint import Call, Dialect, Endpoint, Route
from edgellm.serve.http.guard import Guard, RequestLog
from edgellm.serve.http.streaming import BodyReply, Reply, json_reply
from edgellm.serve.llama_cpp.routes import LLAMA_CPP
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.ollama.routes import OLLAMA
from edgellm.serve.openai.routes import OPENAI, RESPONSES
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError, stopping

_NONCE = "NONCE"


async def page(call: Call) -> Reply:
    """Return the chat page to browsers.

    Its content security policy lets it run only its own scripts, and connect only to this server.
    Other clients get the text that Ollama's clients look for at this path.
    """
    if "text/html" not in (call.header("accept") or ""):
        return BodyReply(b"Ollama is running", "text/plain; charset=utf-8")
    nonce = base64.b64encode(secrets.token_bytes(18)).decode()
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return BodyReply(
        _source().replace(f'nonce="{_NONCE}"', f'nonce="{nonce}"').encode(),
        "text/html; charset=utf-8",
        headers={
            "content-security-policy": policy,
            "x-frame-options": "DENY",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        },
    )


@cache
def _source() -> str:
    """Return the page with its style and its scripts where it names them."""
    folder = files("edgellm.serve").joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    return re.sub(r"/\* (\w+\.(?:css|js)) \*/", lambda name: read(name[1]), read("page.html"))


async def health(call: Call) -> Reply:
    if call.answering.stopping:
        raise stopping()
    return json_reply({"status": "ok"})


OWN = replace(
    OPENAI,
    name="edgellm",
    routes=[
        Route("/health", {"GET": health}),
        Route("/v1/health", {"GET": health}),
        Route("/", {"GET": page}),
    ],
)
# For a path without a route, the first dialect that owns it writes the error; else OpenAI's does.
DIALECTS: Sequence[Dialect] = (OPENAI, RESPONSES, LLAMA_CPP, OLLAMA, ANTHROPIC, OWN)


def create_app(
    pool: ModelPool,
    options: ServeOptions | None = None,
    *,
    bring_prefix: BringPrefix | None = None,
) -> Starlette:
    """Create an application for an ASGI server; `app.state.answering` is its `Answering`.

    The application's life span loads the first model, and unloads all models at its end.

    Args:
        bring_prefix: see `Answering`.
    """
    answering = Answering(pool, options or ServeOptions(), bring_prefix=bring_prefix)

    @asynccontextmanager
    async def life_span(app: Starlette) -> AsyncIterator[None]:
        await pool.start()
        try:
            yield
        finally:
            answering.stop()
            await pool.close()

    app = Starlette(
        routes=[
            StarletteRoute(
                route.path, Endpoint(route, dialect, answering), methods=list(route.handlers)
            )
            for dialect in DIALECTS
            for route in dialect.routes
        ],
        middleware=[
            Middleware(RequestLog),
            Middleware(Guard, options=answering.options, error=path_error),
        ],
        exception_handlers={HTTPException: _no_route},
        lifespan=life_span,
    )
    app.state.answering = answering
    return app


def path_error(path: str, error: RequestError) -> Reply:
    """Return the reply for an error at a path, in the dialect that the path belongs to."""
    for dialect in DIALECTS:
        if dialect.owns(path) or any(route.path == path for route in dialect.routes):
            return dialect.error(error)
    return OPENAI.error(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        wrong = RequestError("method_not_allowed", f"{request.method} is not for this path")
    else:
        wrong = RequestError("not_found", "there is nothing at this path")
    reply = path_error(request.url.path, wrong)
    assert isinstance(reply, BodyReply)
    headers = {**reply.headers, **(error.headers or {})}
    return Response(reply.body, reply.status, headers, reply.media_type)


__all__ = ["DIALECTS", "create_app", "path_error"]
