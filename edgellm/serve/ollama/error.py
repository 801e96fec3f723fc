"""Errors as Ollama writes them."""

from __future__ import annotations

from edgellm.serve.http.streaming import JSON, Frame
from edgellm.serve.request_error import RequestError


def error_body(error: RequestError) -> JSON:
    if error.code == "model_not_found":
        return {"error": f"model not found: {error.message}"}
    return {"error": error.message}


def error_frames(error: RequestError) -> list[Frame]:
    """In mid-stream: a last line, which clients raise."""
    return [Frame(error_body(error))]
