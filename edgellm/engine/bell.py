"""Threads that wait while another one steps for them."""

from __future__ import annotations

import queue
from collections.abc import Callable

# Seconds after which a thread looks by itself: the one that was to wake it may be interrupted.
_PATIENCE = 0.5

_Waiter = queue.SimpleQueue[None]  # waits and wakes in C: an interrupt leaves nothing half done


class Bell:
    """Waking of threads: all that have news, and one of the others, which steps next.

    To wake them all would be a crowd of threads at each step, of which one can go on.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Waiter, Callable[[], bool]] = {}

    def wait(self, has_news: Callable[[], bool], *, busy: Callable[[], bool]) -> None:
        """Wait for `ring`, unless there is news or no thread is busy, so that none will come.

        Args:
            has_news: whether this thread need not wait longer; others ask as well.
        """
        waiter = _Waiter()
        # before the question: a thread that rings either finds it there, or is no longer busy
        self._waiting[waiter] = has_news
        woken = False
        try:
            if busy() and not has_news():
                waiter.get(timeout=_PATIENCE)
            woken = True
        except queue.Empty:
            woken = True
        finally:
            self._waiting.pop(waiter, None)
            if not woken:  # interrupted: perhaps it was the one to step next
                self.ring()

    def ring(self) -> None:
        """Wake threads after a change that they may wait for; called by a thread that is done."""
        if not self._waiting:
            return
        nobody_steps = True
        for waiter, has_news in list(self._waiting.items()):
            if has_news():
                waiter.put(None)
            elif nobody_steps:
                waiter.put(None)
                nobody_steps = False
