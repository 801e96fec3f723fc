"""Errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.serve.http.streaming import JSON
from edgellm.serve.request_error import Kind, RequestError

_TYPES: Mapping[Kind, str] = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "internal": "server_error",
    "overloaded": "overloaded_error",
    "unavailable": "unavailable_error",
    "context_length": "exceed_context_size_error",
}


def error_body(error: RequestError) -> JSON:
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.kind, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
            **error.details,
        }
    }
