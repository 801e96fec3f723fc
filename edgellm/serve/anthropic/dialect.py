"""Dialect of Anthropic: its routes and the form of its errors."""

from __future__ import annotations

from edgellm.serve.anthropic import chat
from edgellm.serve.anthropic.error import error_body, error_frames
from edgellm.serve.http.endpoint import Dialect

ANTHROPIC = Dialect(
    name="anthropic",
    routes=chat.ROUTES,
    error_body=error_body,
    error_frames=error_frames,
    owns=lambda path: path.startswith("/v1/messages"),
)
