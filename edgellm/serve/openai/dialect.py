"""Dialects of OpenAI, with extensions by other servers, and of its responses API."""

from __future__ import annotations

from edgellm.serve.http.endpoint import Dialect
from edgellm.serve.openai import chat, completions, embeddings, mistral_fim, models, responses
from edgellm.serve.openai.error import error_body, error_frames

OPENAI = Dialect(
    name="openai",
    routes=[
        *chat.ROUTES,
        *completions.ROUTES,
        *mistral_fim.ROUTES,
        *embeddings.ROUTES,
        *models.ROUTES,
    ],
    error_body=error_body,
    error_frames=error_frames,
)
RESPONSES = Dialect(
    name="responses",
    routes=responses.ROUTES,
    error_body=error_body,
    error_frames=responses.error_frames,
)
