"""Prefill lane: threads that compute prompts on another device, beside the engine's thread.

One job runs at a time, a few chunks of one prompt, in a thread that ends with it. Its blocks are
reserved before (`Growth`), and a later step takes over the rows.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Rows, Span
from edgellm.cache.growth import Growth
from edgellm.engine.request import Request
from edgellm.engine.thread import EngineThread


class PrefillJob:
    """Rows of a prompt that the prefill lane computes.

    Attributes:
        request: request of the prompt.
        span: the rows, at the end of `growth`.
        growth: sequence that the rows go to, until it is attached to the request's sequence.
        rows: results; None where `error` says why there are none.
        seconds: seconds that the job took.
    """

    def __init__(self, request: Request, span: Span) -> None:
        """See `Growth` for the exceptions."""
        self.request = request
        self.growth = Growth(span.sequence, len(span.tokens))
        self.span = replace(span, sequence=self.growth)
        self.rows: Rows | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._base = span.sequence
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether the job has ended, so that `growth` is no longer written to."""
        return self._ended.is_set()

    @property
    def obsolete(self) -> bool:
        """Whether the request is over, or its sequence no longer ends where the job begins."""
        request, base = self.request, self._base
        moved = request.context.sequence is not base or len(base) != self.growth.start
        return request.finished or request.withdrawn or moved

    def run(self, backend: Backend) -> None:
        """Compute the rows."""
        start = time.perf_counter()
        try:
            (self.rows,) = backend.run([self.span], should_stop=self._should_stop)
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - start
        self._ended.set()

    def wait(self) -> None:
        """Wait for the end."""
        self._ended.wait()

    def _should_stop(self) -> bool:
        return self.obsolete or self.request.stop_now()


class PrefillLane:
    """Runner of one job after the other; all is for the engine's thread."""

    def __init__(self, thread: EngineThread, backend: Backend) -> None:
        """`thread` is told when a job has ended."""
        self._thread = thread
        self._backend = backend
        self._job: PrefillJob | None = None

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return self._job is not None and not self._job.ended

    @property
    def free(self) -> bool:
        """Whether there is no job, not even one that has ended and was not taken."""
        return self._job is None

    def begin(self, job: PrefillJob) -> None:
        """Start a job, when `free`.

        Raises:
            RuntimeError: no more threads can be started.
        """
        # no daemon: the end of the program waits for the end of a chunk
        thread = threading.Thread(target=self._run, args=(job,), name="edgellm-prefill")
        try:
            thread.start()
        except RuntimeError:
            job.growth.close()
            raise
        self._job = job

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
            self.drop_obsolete()

    def drop_obsolete(self) -> None:
        """Drop an obsolete job if it has ended; else its thread has it dropped at its end."""
        job = self._job
        if job is not None and job.ended and job.obsolete:
            job.growth.land().close()  # computed blocks can still be found
            self._job = None

    def _run(self, job: PrefillJob) -> None:
        job.run(self._backend)
        del job  # the thread that takes it has the only reference
        self._thread.soon(self.drop_obsolete)
