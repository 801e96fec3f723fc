"""Times of calls that are made to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

# What takes longer is timed once: an emulated accelerator needs minutes for a chunk.
_LONG_S = 1.0


def repeated(run: Callable[[], Result], *, times: int = 3) -> list[tuple[float, Result]]:
    """Seconds and result of each of some calls; of one if it takes long."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        found.append((seconds, result))
        if seconds > _LONG_S:
            break
    return found


def best_seconds(run: Callable[[], object], *, times: int = 3) -> float:
    """Of the fastest of some calls."""
    return min(seconds for seconds, _ in repeated(run, times=times))
