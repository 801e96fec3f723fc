"""Cases of which a default run takes some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases, a tuple for several arguments; those behind the first of each `count` are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.slow if i % count else [],
        )
        for i, case in enumerate(cases)
    ]
