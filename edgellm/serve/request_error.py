"""Errors of requests, independent of any dialect: each dialect renders its own error body.

The message of an unexpected exception stays in the server's log, because it may contain paths or
texts of other clients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Literal

from edgellm.errors import (
    CacheFullError,
    CancelledError,
    ContextOverflowError,
    EdgeLLMError,
    OptionError,
    TemplateError,
    TokenizerError,
    UnsupportedModelError,
)

Kind = Literal[
    "invalid_request",
    "context_length",
    "not_supported",
    "authentication",
    "permission",
    "not_found",
    "method_not_allowed",
    "timeout",
    "too_large",
    "media_type",
    "internal",
    "overloaded",
    "unavailable",
]
# Clients retry on 408, 409, 429 and from 500 on: only errors where a retry may help have these.
STATUS: Mapping[Kind, int] = {
    "invalid_request": 400,
    "context_length": 400,
    "not_supported": 400,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "timeout": 408,
    "too_large": 413,
    "media_type": 415,
    "internal": 500,
    "overloaded": 503,
    "unavailable": 503,
}
# Errors of edgellm that a request can cause; the client is told their messages.
_KINDS: Mapping[type[EdgeLLMError], Kind] = {
    ContextOverflowError: "context_length",
    UnsupportedModelError: "not_supported",
    CacheFullError: "overloaded",
    OptionError: "invalid_request",
    TemplateError: "invalid_request",
    TokenizerError: "invalid_request",
}
_log = logging.getLogger(__name__)


class RequestError(Exception):
    """A request that cannot be answered.

    Attributes:
        kind: sort of error; `STATUS` maps it to an HTTP status.
        message: text for the client: what was asked, what is allowed, what to do.
        param: name of the wrong field, as the client calls it.
        code: OpenAI's error code, where clients look for it.
        retry_after_s: seconds after which another try may help.
        details: further fields of the error's body.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, int | str] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})

    @property
    def status(self) -> int:
        return STATUS[self.kind]

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the error, the same in every dialect."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        if self.kind == "authentication":
            return {"WWW-Authenticate": "Bearer"}
        # a request whose body was not read cannot be followed by another one
        return {"Connection": "close"} if self.kind in ("too_large", "timeout") else {}


def request_error(error: Exception) -> RequestError:
    """Convert an exception to an error that a client may see.

    An exception that no request should cause is logged and becomes `internal`.
    """
    if isinstance(error, RequestError):
        return error
    for known, kind in _KINDS.items():
        if isinstance(error, known):
            retry = 1.0 if kind == "overloaded" else None
            return RequestError(kind, str(error), retry_after_s=retry)
    if isinstance(error, CancelledError):
        return RequestError("unavailable", "the answer was stopped", retry_after_s=1)
    _log.error("a request failed", exc_info=error)
    return RequestError("internal", "the server failed on this request; its log says why")


def stopping() -> RequestError:
    return RequestError("unavailable", "the server is stopping", retry_after_s=1)


def load_error(model: str, error: Exception) -> RequestError:
    """Return the client's error for a model that could not be loaded.

    The reason is logged, and not told to the client, because it may name paths.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EdgeLLMError):
        _log.error("model %s cannot be loaded: %s", model, error)
    else:
        _log.error("model %s cannot be loaded", model, exc_info=error)
    return RequestError(
        "internal", f"the model {model!r} could not be loaded; the server's log says why"
    )
