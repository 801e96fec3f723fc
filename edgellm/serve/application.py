"""The ASGI application: the routes of all API dialects behind one guard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from edgellm.serve.answering import Answering, BringPrefix
from edgellm.serve.anthropic.dialect import ANTHROPIC
from edgellm.serve.http import health, page
from edgellm.serve.http.endpoint import Dialect, Endpoint
from edgellm.serve.http.guard import Guard
from edgellm.serve.http.request_log import RequestLog
from edgellm.serve.http.streaming import BodyReply, Reply
from edgellm.serve.llama_cpp.dialect import LLAMA_CPP
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.ollama.dialect import OLLAMA
from edgellm.serve.openai.dialect import OPENAI, RESPONSES
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError

OWN = replace(OPENAI, name="edgellm", routes=[*health.ROUTES, *page.ROUTES])
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
