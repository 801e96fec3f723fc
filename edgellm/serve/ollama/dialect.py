"""Dialect of Ollama: its routes and the form of its errors."""

from __future__ import annotations

from edgellm.serve.http.endpoint import Dialect
from edgellm.serve.http.streaming import JSON, Frame
from edgellm.serve.ollama import chat, embeddings, models
from edgellm.serve.request_error import RequestError


def error_body(error: RequestError) -> JSON:
    if error.code == "model_not_found":
        return {"error": f"model not found: {error.message}"}
    return {"error": error.message}


def error_frames(error: RequestError) -> list[Frame]:
    """Return the last line of a stream that fails; clients raise it as an error."""
    return [Frame(error_body(error))]


OLLAMA = Dialect(
    name="ollama",
    routes=[*chat.ROUTES, *embeddings.ROUTES, *models.ROUTES],
    error_body=error_body,
    error_frames=error_frames,
    owns=lambda path: path.startswith("/api/"),
)
