"""Dialect of Ollama: its routes and the form of its errors."""

from __future__ import annotations

from edgellm.serve.http.endpoint import Dialect
from edgellm.serve.ollama import chat, embeddings, models
from edgellm.serve.ollama.error import error_body, error_frames

OLLAMA = Dialect(
    name="ollama",
    routes=[*chat.ROUTES, *embeddings.ROUTES, *models.ROUTES],
    error_body=error_body,
    error_frames=error_frames,
    owns=lambda path: path.startswith("/api/"),
)
