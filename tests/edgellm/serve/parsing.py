"""Bodies whose fields are read as a route reads them, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from edgellm.serve.http.body import parse_fields
from edgellm.serve.http.fields import Fields
from edgellm.serve.request_error import RequestError


def fields_of(body: Mapping[str, Any]) -> Fields:
    return parse_fields(json.dumps(body).encode())


def refusal(read: Callable[[Fields], object], body: Mapping[str, Any]) -> RequestError:
    """The error of a body that cannot be read."""
    data = json.dumps(body).replace("Infinity", "1e999").encode()
    with pytest.raises(RequestError) as raised:
        read(parse_fields(data))
    return raised.value
