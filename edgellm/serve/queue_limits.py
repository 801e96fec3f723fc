"""How much may wait, and what is counted of each ask on its way."""

from __future__ import annotations

import time

from edgellm.results import Stats
from edgellm.serve.metrics import Metrics
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError

# Tokens in a second, until some were measured.
_PROMPT_RATE = 200
_LONGEST_RETRY_S = 60.0


class QueueLimits:
    """Asks that have no first token yet, and the tokens of their prompts."""

    def __init__(self, options: ServeOptions, metrics: Metrics) -> None:
        self.metrics = metrics
        self._options = options
        self._tokens = 0

    def take_in(self) -> Counted:
        """Count an ask that waits.

        Raises:
            RequestError: too many do.
        """
        if self.metrics.waiting >= self._options.max_waiting:
            raise self._refused("requests", f"{self.metrics.waiting} requests wait")
        self.metrics.waiting += 1
        return Counted(self)

    def add_tokens(self, count: int) -> None:
        """Count the tokens of an ask that waits; the only one may have as many as it likes.

        Raises:
            RequestError: too many wait.
        """
        others = self._tokens
        if others and others + count > self._options.max_waiting_tokens:
            raise self._refused("tokens", f"{others} tokens of prompts wait")
        self._tokens += count

    def release_tokens(self, count: int) -> None:
        """So many tokens of an ask that waits have been computed."""
        self._tokens -= count

    def wait_no_more(self, tokens: int) -> None:
        """An ask of so many tokens has begun, or is over."""
        self.metrics.waiting -= 1
        self._tokens -= tokens

    def _refused(self, why: str, what: str) -> RequestError:
        self.metrics.rejected[why] += 1
        rate = self.metrics.prompt_tokens_per_second or _PROMPT_RATE
        retry_after_s = min(_LONGEST_RETRY_S, 1 + self._tokens / rate / 2)
        return RequestError(
            "overloaded",
            f"the server is busy: {what}; try again in {retry_after_s:.0f} seconds",
            retry_after_s=retry_after_s,
        )


class Counted:
    """What is counted of one ask.

    Attributes:
        arrival: on the clock of `time.perf_counter`.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.arrival = self._last = time.perf_counter()
        self._limits = limits
        self._metrics = limits.metrics
        self._tokens = 0
        self._waits, self._runs = True, False

    def take_tokens(self, count: int) -> None:
        """Its prompt has so many tokens.

        Raises:
            RequestError: too many wait.
        """
        self._limits.add_tokens(count)
        self._tokens = count

    def computed(self, count: int) -> None:
        """So many tokens of its prompts wait no more."""
        self._limits.release_tokens(count)
        self._tokens -= count

    def progressed(self) -> None:
        """There are new pieces of an answer."""
        now = time.perf_counter()
        if self._waits:
            self._limits.wait_no_more(self._tokens)
            self._waits, self._runs = False, True
            self._metrics.running += 1
        else:
            self._metrics.between_tokens.add(now - self._last)
        self._last = now

    def answered(self, stats: Stats, reason: str, *, sample: int) -> None:
        """One of its answers is complete."""
        seconds = time.perf_counter() - self.arrival
        self._metrics.answered(stats, reason, seconds=seconds, first=sample == 0)

    def leave(self) -> None:
        """It is over, or its client has gone."""
        if self._waits:
            self._limits.wait_no_more(self._tokens)
        if self._runs:
            self._metrics.running -= 1
        self._waits = self._runs = False
