"""Work on texts that no answer comes of, such as counting tokens: a little of it at a time.

It is not in the queue of answers, so it has a limit of its own, and threads of its own: those that
take prompts in stay free.
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
# At work and waiting: what a user's editor asks for at once.
_MOST = 16
_RETRY_S = 1
# A tokenizer takes a second for as many, and prompts of others wait for it.
MOST_CHARACTERS = MOST_TOKENS = 1 << 20


class TextWork:
    """Calls functions, at most 16 at once, for the event loop.

    Args:
        metrics: where those that are refused are counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._places = threading.Semaphore(_MOST)
        self._threads = ThreadPoolExecutor(_THREADS, "edgellm-text")

    async def call(self, function: Callable[[], T]) -> T:
        """What a function returns. Its place is taken until it has returned, also when whoever
        waits for it has gone.

        Raises:
            RequestError: too many are at work or wait, or there are no more.
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
        """Take in no more; what was taken in goes on to its end."""
        self._threads.shutdown(wait=False)
