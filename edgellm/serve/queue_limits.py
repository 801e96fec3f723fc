"""Limits of the queue of asks, counters of each unfinished ask, and threads for texts.

Work on texts that needs no answer, such as counting tokens, has a limit of its own, and threads of
its own, so that those that encode prompts stay free.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgellm.results import Stats
from edgellm.serve.metrics import Metrics
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError, stopping

# Tokens of prefill per second, assumed until the first prompts are measured.
_PROMPT_RATE = 200
_LONGEST_RETRY_S = 60.0
T = TypeVar("T")
_THREADS = 2
# Functions at work and waiting: as many as a user's editor asks for at once.
_MOST = 16
_RETRY_S = 1
# A tokenizer takes a second for this many, and prompts of other requests wait for it.
MOST_CHARACTERS = MOST_TOKENS = 1 << 20


class QueueLimits:
    """Limits of the asks without a first token, and of the tokens of their prompts.

    An owner (one API key of several) with less than its share of the queue is admitted even where
    other owners have filled the queue.
    """

    def __init__(self, options: ServeOptions, metrics: Metrics) -> None:
        self.metrics = metrics
        self._options = options
        self._owners = max(1, len(options.api_keys))
        self._waiting: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def take_in(self, owner: str) -> Counted:
        """Admit an ask to the queue, and return its counters.

        Raises:
            RequestError: too many asks wait.
        """
        limit, waiting = self._options.max_waiting, self.metrics.waiting
        if waiting >= limit and self._waiting[owner] >= max(1, limit // self._owners):
            raise self._refused("requests", f"{waiting} requests wait")
        self.metrics.waiting += 1
        self._waiting[owner] += 1
        return Counted(self, owner)

    def add_tokens(self, owner: str, count: int) -> None:
        """Count the prompt tokens of a waiting ask.

        An owner without other waiting tokens may have a prompt of any length.

        Raises:
            RequestError: too many tokens wait.
        """
        limit, own, all_tokens = self._options.max_waiting_tokens, self._tokens[owner], self.tokens
        if own and all_tokens + count > limit and own + count > limit // self._owners:
            raise self._refused("tokens", f"{all_tokens} tokens of prompts wait")
        self._tokens[owner] += count

    def release_tokens(self, owner: str, count: int) -> None:
        """Withdraw `count` computed tokens of an ask that still waits."""
        self._tokens[owner] -= count

    def wait_no_more(self, owner: str, tokens: int) -> None:
        """Withdraw an ask with `tokens` waiting tokens: its first token is there, or it is over."""
        self.metrics.waiting -= 1
        self._waiting[owner] -= 1
        self._tokens[owner] -= tokens

    @property
    def tokens(self) -> int:
        """Number of tokens in all waiting prompts."""
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
    """Counters of one ask, from its arrival to its end.

    Attributes:
        arrival: time of arrival, on the clock of `time.perf_counter`.
    """

    def __init__(self, limits: QueueLimits, owner: str) -> None:
        self.arrival = self._last = time.perf_counter()
        self._limits = limits
        self._owner = owner
        self._metrics = limits.metrics
        self._tokens = 0
        self._waits, self._runs = True, False

    def take_tokens(self, count: int) -> None:
        """Count the tokens of the ask's prompt or prompts.

        Raises:
            RequestError: too many tokens wait.
        """
        self._limits.add_tokens(self._owner, count)
        self._tokens = count

    def computed(self, count: int) -> None:
        """Count `count` tokens of the ask's prompts as computed, while it still waits."""
        self._limits.release_tokens(self._owner, count)
        self._tokens -= count

    def progressed(self) -> None:
        """Count new pieces of an answer; the first ones end the ask's wait."""
        now = time.perf_counter()
        if self._waits:
            self._limits.wait_no_more(self._owner, self._tokens)
            self._waits, self._runs = False, True
            self._metrics.running += 1
        else:
            self._metrics.between_tokens.add(now - self._last)
        self._last = now

    def answered(self, stats: Stats, reason: str, *, sample: int) -> None:
        """Count a complete answer to the ask."""
        seconds = time.perf_counter() - self.arrival
        self._metrics.answered(stats, reason, seconds=seconds, first=sample == 0)

    def leave(self) -> None:
        """Withdraw the ask: its answers are complete, or it failed, or its client has gone."""
        if self._waits:
            self._limits.wait_no_more(self._owner, self._tokens)
        if self._runs:
            self._metrics.running -= 1
        self._waits = self._runs = False


class TextWork:
    """Two threads that call functions for the event loop; at most 16 calls run or wait.

    Args:
        metrics: counters, among them that of refused calls.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._places = threading.Semaphore(_MOST)
        self._threads = ThreadPoolExecutor(_THREADS, "edgellm-text")

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread, and return its result.

        The call keeps its place until the function has returned, even if the caller is cancelled.

        Raises:
            RequestError: too many calls run or wait, or the server is stopping.
        """
        if not self._places.acquire(blocking=False):
            self._metrics.rejected["texts"] += 1
            raise RequestError(
                "overloaded",
                f"the server is busy: {_MOST} texts wait to be read; try again in {_RETRY_S} s",
                retry_after_s=_RETRY_S,
            )
        try:
            future = self._threads.submit(function)
        except RuntimeError:
            self._places.release()
            raise stopping() from None
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take no further calls; calls that were taken run to their end."""
        self._threads.shutdown(wait=False)
