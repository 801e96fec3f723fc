"""Steps for readers that do not step themselves: one thread, while there are any.

It runs ahead of them, until an answer has more unread pieces than it may (`Request.paused`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from edgellm.engine.loop import Loop, have_news
from edgellm.engine.request import Request

# Called in the pump's thread, with an error that is no request's own.
Wake = Callable[[BaseException | None], None]


class Reader:
    """The end of a stream that waits for news of requests.

    Attributes:
        requests: requests on their way.
        wake: called once when there is news; None: the reader does not wait.
        error: error that came while the reader did not wait.
    """

    def __init__(self) -> None:
        self.requests: Sequence[Request] = ()
        self.wake: Wake | None = None
        self.error: BaseException | None = None
        self._thread = threading.current_thread()

    @property
    def done(self) -> bool:
        """Whether no step brings the reader anything."""
        return all(r.finished or r.withdrawn or r.paused for r in self.requests)

    def withdraw(self) -> None:
        """Withdraw its requests: a running step ends early, and the next one forgets them."""
        for request in self.requests:
            request.withdraw()

    def withdraw_if_dead(self) -> None:
        """`withdraw` where the thread that would read has ended."""
        if not self._thread.is_alive():
            self.withdraw()


class Pump:
    """The thread of one engine; there is none while no reader waits."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._readers: set[Reader] = set()
        self._thread: threading.Thread | None = None

    def watch(self, reader: Reader, requests: Sequence[Request], wake: Wake) -> bool:
        """Step for requests until they are finished, and wake their reader when there are news.

        Returns:
            False if there are some already; the reader is not woken then.
        """
        with self._lock:
            error, reader.error = reader.error, None
            if error is not None:
                wake(error)
                return True
            reader.requests = requests
            self._readers.add(reader)
            news = have_news(requests)
            reader.wake = None if news else wake
            if self._thread is None:
                # no daemon: the end of the program waits for a step, and not the other way round
                thread = threading.Thread(target=self._run, name="edgellm-pump")
                thread.start()
                self._thread = thread
        return not news

    def _run(self) -> None:
        idle = False
        try:
            while not idle:
                idle = not self._readers  # a last step gives back what was withdrawn
                error = None
                try:
                    self._loop.advance(())
                # also a SystemExit of a logit filter, or a panic of Rust's: readers wait for it
                except BaseException as raised:
                    error = raised
                with self._lock:
                    self._wake(error)
                    idle = idle and not self._readers
                    if idle:
                        self._thread = None
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None  # the next reader has another one started

    def _wake(self, error: BaseException | None) -> None:
        """Tell readers what is new, and let go of those that need no step."""
        for reader in list(self._readers):
            reader.withdraw_if_dead()
            if reader.wake is None:
                reader.error = error
            elif error is not None or have_news(reader.requests):
                wake, reader.wake = reader.wake, None
                wake(error)
            if reader.done or error is not None:
                self._readers.discard(reader)
