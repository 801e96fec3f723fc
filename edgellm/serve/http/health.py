"""`/health`: whether the server is up, for clients with and without a key."""

from __future__ import annotations

from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.request_error import RequestError


async def health(call: Call) -> Reply:
    if call.answering.stopping:
        raise RequestError("unavailable", "the server is stopping", retry_after_s=1)
    return json_reply({"status": "ok"})


ROUTES = (Route("/health", {"GET": health}), Route("/v1/health", {"GET": health}))
