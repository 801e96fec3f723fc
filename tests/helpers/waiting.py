"""Waiting without a clock in the verdict: conditions with a generous ceiling, and a clock of the test's own."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable

CEILING_S = 300.0


def until(condition: Callable[[], bool], *, seconds: float = CEILING_S) -> None:
    """Wait for a condition. On a hang the stacks of all threads go to stderr before the failure."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            raise AssertionError(f"the condition did not hold within {seconds} s")
        time.sleep(0.001)


class Clock:
    """Time that passes by calls and by `advance` alone, in the place of a module's `time`.

    Patch it in for the module: `monkeypatch.setattr("edgellm.engine.request.time", Clock())`.
    All clocks of `time` read the same value.

    Args:
        per_call: seconds that pass with each look.
    """

    def __init__(self, *, per_call: float = 0.0) -> None:
        self.now = 1000.0
        self._per_call = per_call

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        self.now += self._per_call
        return self.now

    monotonic = perf_counter
    time = perf_counter
