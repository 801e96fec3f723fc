"""The chat page: one HTML file that loads nothing from other servers."""

from __future__ import annotations

import base64
import secrets
from functools import cache
from importlib.resources import files

from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import BodyReply, Reply

_NONCE = "NONCE"


async def page(call: Call) -> Reply:
    """Return the chat page to browsers.

    Its content security policy lets it run only its own scripts, and connect only to this server.
    Other clients get the text that Ollama's clients look for at this path.
    """
    if "text/html" not in (call.header("accept") or ""):
        return BodyReply(b"Ollama is running", "text/plain; charset=utf-8")
    nonce = base64.b64encode(secrets.token_bytes(18)).decode()
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return BodyReply(
        _source().replace(f'nonce="{_NONCE}"', f'nonce="{nonce}"').encode(),
        "text/html; charset=utf-8",
        headers={
            "content-security-policy": policy,
            "x-frame-options": "DENY",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        },
    )


@cache
def _source() -> str:
    return files("edgellm.serve.http").joinpath("page.html").read_text(encoding="utf-8")


ROUTES = (Route("/", {"GET": page}),)
