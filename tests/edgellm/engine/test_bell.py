"""Who is woken when a step is over."""

from __future__ import annotations

import threading
import time

from edgellm.engine.bell import Bell


class Waiting(threading.Thread):
    """Waits once, for news of its own."""

    def __init__(self, bell: Bell) -> None:
        super().__init__(daemon=True)
        self._bell = bell
        self.news = self.asked = False
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        start = time.monotonic()
        self._bell.wait(self._has_news, busy=lambda: True)
        self.seconds = time.monotonic() - start

    def _has_news(self) -> bool:
        self.asked = True
        return self.news


def waiting(bell: Bell, count: int) -> list[Waiting]:
    threads = []
    for _ in range(count):
        threads.append(Waiting(bell))
        while not threads[-1].asked:
            time.sleep(0.001)
    time.sleep(0.02)
    return threads


def test_wakes_those_with_news_and_one_to_step() -> None:
    bell = Bell()
    threads = waiting(bell, 6)
    threads[2].news = threads[5].news = True
    bell.ring()
    time.sleep(0.1)
    assert [thread.is_alive() for thread in threads] == [False, True, False, True, True, False]
    for thread in threads:
        thread.join(timeout=5)  # the others look by themselves after a while
        assert not thread.is_alive()


def test_does_not_wait_where_nobody_is_busy_or_there_is_news() -> None:
    bell = Bell()
    start = time.monotonic()
    bell.wait(lambda: False, busy=lambda: False)
    bell.wait(lambda: True, busy=lambda: True)
    assert time.monotonic() - start < 0.2
    bell.ring()  # nobody is left in the line
    assert not bell._waiting
