"""Errors in the form of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.serve.http.streaming import JSON, Frame
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
