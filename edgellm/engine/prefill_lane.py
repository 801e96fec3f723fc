"""The thread that computes prompts on a device of their own, beside the thread that steps.

One job at a time, a few chunks of one prompt, each in a thread that ends with it. It holds no lock:
its blocks are reserved before (`Growth`), and whoever steps takes over what it has computed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Rows, Span
from edgellm.cache.growth import Growth
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.request import Request
from edgellm.errors import CancelledError, OptionError


class PrefillJob:
    """Rows of a prompt on their way.

    Attributes:
        request: whose rows they are.
        span: the rows, at the end of `growth`.
        growth: the sequence that they go to, until the request takes it over.
        rows: what was computed; None where `error` says why it was not.
        seconds: that it took.
        ended: nothing writes to `growth` any more.
    """

    def __init__(self, request: Request, span: Span) -> None:
        """See `Growth` for what is raised."""
        self.request = request
        self.growth = Growth(span.sequence, len(span.tokens))
        self.span = replace(span, sequence=self.growth)
        self.rows: Rows | None = None
        self.error: Exception | None = CancelledError("the thread of prefill was stopped")
        self.seconds = 0.0
        self.ended = False
        self._base = span.sequence
        self._process = os.getpid()
        self._claim = threading.Lock()
        # a bare lock: `Event` is Python, which an interrupt may leave half done
        self._running = threading.Lock()
        self._running.acquire()

    @property
    def obsolete(self) -> bool:
        """Whether the request is over, or goes on from elsewhere."""
        request, base = self.request, self._base
        moved = request.context.sequence is not base or len(base) != self.growth.start
        return request.finished or request.withdrawn or moved

    @property
    def lost(self) -> bool:
        """Whether its thread is another process's, from which this one was forked."""
        return not self.ended and self._process != os.getpid()

    def run(self, backend: Backend) -> None:
        """Compute, unless another thread does."""
        if not self._claim.acquire(blocking=False):
            return
        start = time.perf_counter()
        try:
            (self.rows,) = backend.run([self.span], should_stop=self._should_stop)
            self.error = None
        except Exception as error:
            self.error = error
        finally:
            self.seconds = time.perf_counter() - start
            self.ended = True
            self._running.release()

    def wait(self) -> None:
        """Wait for the end; for one thread."""
        if not self.ended:
            self._running.acquire()

    def _should_stop(self) -> bool:
        return self.obsolete or self.request.stop_now()


class PrefillLane:
    """Takes one job after the other; all but `busy` is for whoever has the cache's lock."""

    def __init__(self, cache: KVCache, backend: Backend, *, on_end: Callable[[], None]) -> None:
        """`on_end` is called in the thread of a job, when it has ended."""
        self._cache = cache
        self._backend = backend
        self._on_end = on_end
        self._job: PrefillJob | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is on its way, in this process."""
        job = self._job
        return job is not None and not job.ended and not job.lost

    @property
    def free(self) -> bool:
        """Whether there is none, also none that has ended and was not taken."""
        return self._job is None

    def check(self) -> None:
        """Refuse to go on where the end of a job will never come.

        Raises:
            OptionError: the process was forked in the middle of one.
        """
        if self._job is not None and self._job.lost:
            raise OptionError(
                "this process was forked while another thread computed a prompt; load the model in "
                "the new process, or fork while nothing is answered"
            )

    def begin(self, job: PrefillJob) -> None:
        """Compute a job, when `free`.

        Raises:
            RuntimeError: there can be no more threads.
        """
        self._job = job
        try:
            self.launch()
        except Exception:
            self._job = None
            job.growth.close()
            raise

    def launch(self) -> None:
        """Start a thread for the job, if there is one; again where an interrupt may have come
        before the first."""
        if self._job is not None and not self._job.ended:
            # no daemon: the end of the program waits for a chunk, and not the other way round
            thread = threading.Thread(target=self._run, args=(self._job,), name="edgellm-prefill")
            _start(thread)

    def take(self) -> PrefillJob | None:
        """The job that has ended, if one has; it is the caller's."""
        job = self._job
        if job is None or not job.ended:
            return None
        self._job = None
        return job

    def stop_obsolete(self) -> None:
        """Have the blocks of a job back that nobody wants any more; waits for it, if need be."""
        if self._job is not None and self._job.obsolete:
            self._job.wait()
            self._drop_obsolete()

    def drop_obsolete(self) -> None:
        """Likewise, if it has ended; else its thread sees to that."""
        if self._job is not None and self._job.ended:
            self._drop_obsolete()

    def _drop_obsolete(self) -> None:
        if self._job is not None and self._job.ended and self._job.obsolete:
            self._job.growth.land().close()  # what was computed can still be found
            self._job = None

    def _run(self, job: PrefillJob) -> None:
        try:
            job.run(self._backend)
            del job  # who takes it from here has it alone
            self._cache.soon(self._drop_obsolete)
        finally:
            self._on_end()


def _start(thread: threading.Thread) -> None:
    """Start it.

    `Thread.start` waits in Python for the thread to run, and an interrupt between two lines of that
    may come out as an error of a lock.

    Raises:
        BaseException: the interrupt; perhaps the thread runs.
        RuntimeError: there can be no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        interrupt = error.__context__
        if interrupt is None or isinstance(interrupt, Exception):
            raise
        raise interrupt from None
