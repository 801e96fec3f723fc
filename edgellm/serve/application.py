"""The ASGI application: all dialects behind one guard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from edgellm.serve import (
    anthropic,
    health,
    llama_cpp,
    llama_cpp_error,
    mistral_fim,
    ollama,
    ollama_embeddings,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_models,
    openai_responses,
    page,
)
from edgellm.serve.answering import Answering, BringPrefix
from edgellm.serve.anthropic_error import error_body as anthropic_error_body
from edgellm.serve.anthropic_error import error_frames as anthropic_error_frames
from edgellm.serve.endpoint import Dialect, Endpoint
from edgellm.serve.guard import Guard
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.ollama_error import error_body as ollama_error_body
from edgellm.serve.ollama_error import error_frames as ollama_error_frames
from edgellm.serve.openai_error import error_body, error_frames
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError
from edgellm.serve.streaming import BodyReply, Reply

OPENAI = Dialect(
    name="openai",
    routes=[
        *openai_chat.ROUTES,
        *openai_completions.ROUTES,
        *mistral_fim.ROUTES,
        *openai_embeddings.ROUTES,
        *openai_models.ROUTES,
        *health.ROUTES,
        *page.ROUTES,
    ],
    error_body=error_body,
    error_frames=error_frames,
)
RESPONSES = Dialect(
    name="responses",
    routes=openai_responses.ROUTES,
    error_body=error_body,
    error_frames=openai_responses.error_frames,
)
LLAMA_CPP = Dialect(
    name="llama.cpp",
    routes=llama_cpp.ROUTES,
    error_body=llama_cpp_error.error_body,
    error_frames=llama_cpp_error.error_frames,
    status=llama_cpp_error.error_status,
)
OLLAMA = Dialect(
    name="ollama",
    routes=[*ollama.ROUTES, *ollama_embeddings.ROUTES, *ollama_models.ROUTES],
    error_body=ollama_error_body,
    error_frames=ollama_error_frames,
    owns=lambda path: path.startswith("/api/"),
)
ANTHROPIC = Dialect(
    name="anthropic",
    routes=anthropic.ROUTES,
    error_body=anthropic_error_body,
    error_frames=anthropic_error_frames,
    owns=lambda path: path.startswith("/v1/messages"),
)
# The first that owns a path writes errors of paths that no route has; else it is OpenAI's.
DIALECTS: Sequence[Dialect] = (OPENAI, RESPONSES, LLAMA_CPP, OLLAMA, ANTHROPIC)


def create_app(
    pool: ModelPool,
    options: ServeOptions | None = None,
    *,
    bring_prefix: BringPrefix | None = None,
) -> Starlette:
    """An application for an ASGI server; `app.state.answering` is its `Answering`.

    Its life span loads the first model and unloads all at its end.

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
        middleware=[Middleware(Guard, options=answering.options, error=path_error)],
        exception_handlers={HTTPException: _no_route},
        lifespan=life_span,
    )
    app.state.answering = answering
    return app


def path_error(path: str, error: RequestError) -> Reply:
    """An error of a path, in the dialect that it belongs to."""
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


__all__ = ["DIALECTS", "OPENAI", "create_app", "path_error"]
