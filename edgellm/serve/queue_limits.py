"""How much may wait, and what is counted of each ask on its way."""

from __future__ import annotations

import math
import time
from collections import Counter

from edgellm.results import Stats
from edgellm.serve.metrics import Metrics
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError

# Tokens in a second, until some were measured.
_PROMPT_RATE = 200
_LONGEST_RETRY_S = 60.0


class QueueLimits:
    """Asks that have no first token yet, and the tokens of their prompts.

    Who has fewer than its share of what may wait, one key of several, is taken in even where others
    have filled the queue.
    """

    def __init__(self, options: ServeOptions, metrics: Metrics) -> None:
        self.metrics = metrics
        self._options = options
        self._owners = max(1, len(options.api_keys))
        self._waiting: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def take_in(self, owner: str) -> Counted:
        """Count an ask that waits.

        Raises:
            RequestError: too many do.
        """
        limit, waiting = self._options.max_waiting, self.metrics.waiting
        if waiting >= limit and self._waiting[owner] >= max(1, limit // self._owners):
            raise self._refused("requests", f"{waiting} requests wait")
        self.metrics.waiting += 1
        self._waiting[owner] += 1
        return Counted(self, owner)

    def add_tokens(self, owner: str, count: int) -> None:
        """Count the tokens of an ask that waits; the only one of its owner may have as many as it
        likes.

        Raises:
            RequestError: too many wait.
        """
        limit, own, all_tokens = self._options.max_waiting_tokens, self._tokens[owner], self.tokens
        if own and all_tokens + count > limit and own + count > limit // self._owners:
            raise self._refused("tokens", f"{all_tokens} tokens of prompts wait")
        self._tokens[owner] += count

    def release_tokens(self, owner: str, count: int) -> None:
        """So many tokens of an ask that waits have been computed."""
        self._tokens[owner] -= count

    def wait_no_more(self, owner: str, tokens: int) -> None:
        """An ask of so many tokens has begun, or is over."""
        self.metrics.waiting -= 1
        self._waiting[owner] -= 1
        self._tokens[owner] -= tokens

    @property
    def tokens(self) -> int:
        """Of all prompts that wait."""
        return self._tokens.total()

    def _refused(self, why: str, what: str) -> RequestError:
        self.metrics.rejected[why] += 1
        rate = self.metrics.prompt_tokens_per_second or _PROMPT_RATE
        retry_after_s = math.ceil(min(_LONGEST_RETRY_S, 1 + self.tokens / rate / 2))
        return RequestError(
            "overloaded",
            f"the server is busy: {what}; try again in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )


class Counted:
    """What is counted of one ask.

    Attributes:
        arrival: on the clock of `time.perf_counter`.
    """

    def __init__(self, limits: QueueLimits, owner: str) -> None:
        self.arrival = self._last = time.perf_counter()
        self._limits = limits
        self._owner = owner
        self._metrics = limits.metrics
        self._tokens = 0
        self._waits, self._runs = True, False

    def take_tokens(self, count: int) -> None:
        """Its prompt has so many tokens.

        Raises:
            RequestError: too many wait.
        """
        self._limits.add_tokens(self._owner, count)
        self._tokens = count

    def computed(self, count: int) -> None:
        """So many tokens of its prompts wait no more."""
        self._limits.release_tokens(self._owner, count)
        self._tokens -= count

    def progressed(self) -> None:
        """There are new pieces of an answer."""
        now = time.perf_counter()
        if self._waits:
            self._limits.wait_no_more(self._owner, self._tokens)
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
            self._limits.wait_no_more(self._owner, self._tokens)
        if self._runs:
            self._metrics.running -= 1
        self._waits = self._runs = False
