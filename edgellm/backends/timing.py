"""Times of calls that are made to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")
# Of one call each; the fastest was disturbed least, and their spread is what they are worth.
Samples = tuple[float, ...]

# What takes longer is timed once: an emulated accelerator needs minutes for a chunk.
_LONG_S = 1.0
# No further round of calls in turns begins after this time.
_ROUNDS_S = 3.0


def repeated(run: Callable[[], Result], *, times: int = 3) -> list[tuple[float, Result]]:
    """Seconds and result of each of some calls; of one if it takes long."""
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
    """Of the fastest of some calls."""
    return min(seconds for seconds, _ in repeated(run, times=times))


def in_turns(
    runs: Mapping[Key, Callable[[], object]], *, times: int = 5, limit_s: float = _ROUNDS_S
) -> dict[Key, Samples]:
    """Seconds of calls to compare, in rounds: what else the machine does disturbs all of them.

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
