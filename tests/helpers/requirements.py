"""Skips for want of something, which EDGELLM_TESTS_REQUIRE turns into failures."""

from __future__ import annotations

import os
from typing import Literal, NoReturn

import pytest

Thing = Literal["native", "node", "chromium", "clients", "model"]


def unavailable(thing: Thing, reason: str) -> NoReturn:
    """Skip a test, or fail it where EDGELLM_TESTS_REQUIRE names the thing: `native,node,...`."""
    if thing in os.environ.get("EDGELLM_TESTS_REQUIRE", "").split(","):
        pytest.fail(f"EDGELLM_TESTS_REQUIRE has {thing}: {reason}", pytrace=False)
    pytest.skip(reason)
