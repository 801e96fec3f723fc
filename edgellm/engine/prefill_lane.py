"""Prefill lane: threads that compute prompts on another device, beside the thread that steps.

One job runs at a time, a few chunks of one prompt, in a thread that ends with it. The thread holds
no lock: its blocks are reserved before (`Growth`), and a later step takes over the rows.
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
    """Rows of a prompt that the prefill lane computes.

    Attributes:
        request: request of the prompt.
        span: the rows, at the end of `growth`.
        growth: sequence that the rows go to, until it is attached to the request's sequence.
        rows: results; None where `error` says why there are none.
        seconds: seconds that the job took.
        ended: whether the job has ended, so that `growth` is no longer written to.
    """

    def __init__(self, request: Request, span: Span) -> None:
        """See `Growth` for the exceptions."""
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
        """Whether the request is over, or its sequence no longer ends where the job begins."""
        request, base = self.request, self._base
        moved = request.context.sequence is not base or len(base) != self.growth.start
        return request.finished or request.withdrawn or moved

    @property
    def lost(self) -> bool:
        """Whether the job's thread is in another process, from which this one was forked."""
        return not self.ended and self._process != os.getpid()

    def run(self, backend: Backend) -> None:
        """Compute the rows, unless another thread does."""
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
        """Wait for the end; only one thread may wait."""
        if not self.ended:
            self._running.acquire()

    def _should_stop(self) -> bool:
        return self.obsolete or self.request.stop_now()


class PrefillLane:
    """Runner of one job after the other; all but `busy` needs the cache's lock."""

    def __init__(self, cache: KVCache, backend: Backend, *, on_end: Callable[[], None]) -> None:
        """`on_end` is called in the thread of a job, when it has ended."""
        self._cache = cache
        self._backend = backend
        self._on_end = on_end
        self._job: PrefillJob | None = None

    @property
    def busy(self) -> bool:
        """Whether a job runs in this process."""
        job = self._job
        return job is not None and not job.ended and not job.lost

    @property
    def free(self) -> bool:
        """Whether there is no job, not even one that has ended and was not taken."""
        return self._job is None

    def check(self) -> None:
        """Refuse to go on where the end of a job will never come.

        Raises:
            OptionError: the process was forked in the middle of a job.
        """
        if self._job is not None and self._job.lost:
            raise OptionError(
                "this process was forked while another thread computed a prompt; load the model in "
                "the new process, or fork while nothing is answered"
            )

    def begin(self, job: PrefillJob) -> None:
        """Start a job, when `free`.

        Raises:
            RuntimeError: no more threads can be started.
        """
        self._job = job
        try:
            self.launch()
        except Exception:
            self._job = None
            job.growth.close()
            raise

    def launch(self) -> None:
        """Start a thread for the job, if any; again where an interrupt may have prevented the
        first."""
        if self._job is not None and not self._job.ended:
            # no daemon: the end of the program waits for the end of a chunk
            thread = threading.Thread(target=self._run, args=(self._job,), name="edgellm-prefill")
            _start(thread)

    def take(self) -> PrefillJob | None:
        """Return the job if it has ended, and forget it; else None."""
        job = self._job
        if job is None or not job.ended:
            return None
        self._job = None
        return job

    def stop_obsolete(self) -> None:
        """Drop an obsolete job and free its blocks; waits for its end, if need be."""
        if self._job is not None and self._job.obsolete:
            self._job.wait()
            self._drop_obsolete()

    def drop_obsolete(self) -> None:
        """Drop an obsolete job if it has ended; else its thread does so at its end."""
        if self._job is not None and self._job.ended:
            self._drop_obsolete()

    def _drop_obsolete(self) -> None:
        if self._job is not None and self._job.ended and self._job.obsolete:
            self._job.growth.land().close()  # computed blocks can still be found
            self._job = None

    def _run(self, job: PrefillJob) -> None:
        try:
            job.run(self._backend)
            del job  # the thread that takes it has the only reference
            self._cache.soon(self._drop_obsolete)
        finally:
            self._on_end()


def _start(thread: threading.Thread) -> None:
    """Start a thread.

    `Thread.start` waits in Python for the thread to run, and an interrupt between two lines of that
    may come out as an error of a lock.

    Raises:
        BaseException: the interrupt; perhaps the thread runs.
        RuntimeError: no more threads can be started.
    """
    try:
        thread.start()
    except RuntimeError as error:
        interrupt = error.__context__
        if interrupt is None or isinstance(interrupt, Exception):
            raise
        raise interrupt from None
