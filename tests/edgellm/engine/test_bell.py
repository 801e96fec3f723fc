"""Who is woken when a step is over."""

from __future__ import annotations

import threading

import pytest
from inspection import mock_waiters, set_patience, threads_at
from waiting import CEILING_S, until

from edgellm.engine.bell import Bell


class Waiting(threading.Thread):
    """Waits once, for news of its own."""

    def __init__(self, bell: Bell) -> None:
        super().__init__(daemon=True)
        self._bell = bell
        self.news = self.asked = False
        self.start()
        until(lambda: self.asked)

    def run(self) -> None:
        self._bell.wait(self._has_news, busy=lambda: True)

    def _has_news(self) -> bool:
        self.asked = True
        return self.news


def test_wakes_those_with_news_and_one_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    set_patience(monkeypatch, 3600)
    bell = Bell()
    threads = [Waiting(bell) for _ in range(6)]
    threads[2].news = threads[5].news = True
    left = list(threads)
    for woken in ((0, 2, 5), (1,), (3,), (4,)):
        bell.ring()
        for i in woken:
            threads[i].join(CEILING_S)
            left.remove(threads[i])
        assert [thread for thread in threads if thread.is_alive()] == left


def test_looks_by_itself_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was to wake it may have been interrupted."""
    set_patience(monkeypatch, 0.001)
    bell = Bell()
    Waiting(bell).join(CEILING_S)
    assert threads_at(bell) == 0


def test_does_not_wait_where_nobody_is_busy_or_there_is_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bell, waiter = Bell(), mock_waiters(monkeypatch)
    bell.wait(lambda: False, busy=lambda: False)
    bell.wait(lambda: True, busy=lambda: True)
    waiter.get.assert_not_called()
    bell.wait(lambda: False, busy=lambda: True)
    waiter.get.assert_called_once()
    bell.ring()
    waiter.put.assert_not_called()  # none is left in the line
