"""Timing of calls that are made only to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")
# Seconds of single calls; the fastest was disturbed least, and their spread shows the uncertainty.
Samples = tuple[float, ...]

# A call that takes longer is timed once: an emulated accelerator needs minutes for a chunk.
_LONG_S = 1.0
# Time after which no further round of calls in turns begins.
_ROUNDS_S = 3.0


def repeated(run: Callable[[], Result], *, times: int = 3) -> list[tuple[float, Result]]:
    """Time some calls, only one if it takes long; return the seconds and result of each."""
    results = []
    for _ in range(times):
        begin = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        results.append((seconds, result))
        if seconds > _LONG_S:
            break
    return results


def best_seconds(run: Callable[[], object], *, times: int = 3) -> float:
    """Return the seconds of the fastest of some calls."""
    return min(seconds for seconds, _ in repeated(run, times=times))


def in_turns(
    runs: Mapping[Key, Callable[[], object]], *, times: int = 5, limit_s: float = _ROUNDS_S
) -> dict[Key, Samples]:
    """Time calls to compare in rounds, so that other work on the machine disturbs all of them.

    The first round warms up and does not count, unless it takes so long that it is the only one.
    """
    rounds: list[dict[Key, float]] = []
    begin = time.perf_counter()
    while len(rounds) <= times and (not rounds or time.perf_counter() - begin < limit_s):
        rounds.append({key: _seconds(run) for key, run in runs.items()})
    counted = rounds[1:] or rounds
    return {key: tuple(seconds[key] for seconds in counted) for key in runs}


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
