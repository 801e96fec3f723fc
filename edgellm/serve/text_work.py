"""Work on texts that needs no answer of a model, such as counting tokens.

This work is not in the queue of answers, so it has a limit of its own. It has threads of its own,
so that the threads that encode prompts stay free.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgellm.serve.metrics import Metrics
from edgellm.serve.request_error import RequestError

T = TypeVar("T")
_THREADS = 2
# Functions at work and waiting: as many as a user's editor asks for at once.
_MOST = 16
_RETRY_S = 1
# A tokenizer takes a second for this many, and prompts of other requests wait for it.
MOST_CHARACTERS = MOST_TOKENS = 1 << 20


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
            raise RequestError(
                "unavailable", "the server is stopping", retry_after_s=_RETRY_S
            ) from None
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take no further calls; calls that were taken run to their end."""
        self._threads.shutdown(wait=False)
