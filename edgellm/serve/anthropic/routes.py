"""Routes of Anthropic, and the form of its errors."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.serve.anthropic import chat
from edgellm.serve.http.endpoint import Dialect
from edgellm.serve.http.streaming import JSON, Frame
from edgellm.serve.request_error import Kind, RequestError

_TYPES: Mapping[Kind, str] = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "timeout": "timeout_error",
    "internal": "api_error",
    "overloaded": "overloaded_error",
    "unavailable": "overloaded_error",
}


def error_body(error: RequestError) -> JSON:
    kind = _TYPES.get(error.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_frames(error: RequestError) -> list[Frame]:
    """Return the event of an error in mid-stream, which clients raise."""
    return [Frame(error_body(error), "error")]


ANTHROPIC = Dialect(
    name="anthropic",
    routes=chat.ROUTES,
    error_body=error_body,
    error_frames=error_frames,
    owns=lambda path: path.startswith("/v1/messages"),
)
