"""Dialect of llama.cpp's server: its routes and the form of its errors."""

from __future__ import annotations

from edgellm.serve.http.endpoint import Dialect
from edgellm.serve.llama_cpp import completion, embedding, metrics, state, text
from edgellm.serve.llama_cpp.error import error_body, error_frames, error_status

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
