"""Dialect of llama.cpp's server: its routes and the form of its errors."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.serve.http.endpoint import Dialect
from edgellm.serve.http.streaming import JSON, Frame
from edgellm.serve.llama_cpp import completion, embedding, metrics, state, text
from edgellm.serve.request_error import Kind, RequestError

_TYPES: Mapping[Kind, str] = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "not_supported": "not_supported_error",
    "internal": "server_error",
    "overloaded": "unavailable_error",
    "unavailable": "unavailable_error",
    "context_length": "exceed_context_size_error",
}


def error_status(error: RequestError) -> int:
    return 501 if error.kind == "not_supported" else error.status


def error_body(error: RequestError) -> JSON:
    return {
        "error": {
            "code": error_status(error),
            "message": error.message,
            "type": _TYPES.get(error.kind, "invalid_request_error"),
            **error.details,
        }
    }


def error_frames(error: RequestError) -> list[Frame]:
    return [Frame(error_body(error))]


LLAMA_CPP = Dialect(
    name="llama.cpp",
    routes=[
        *completion.ROUTES,
        *embedding.ROUTES,
        *text.ROUTES,
        *state.ROUTES,
        *metrics.ROUTES,
    ],
    error_body=error_body,
    error_frames=error_frames,
    status=error_status,
)
