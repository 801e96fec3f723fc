"""Prefill: a prompt into the KV cache, in chunks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.decode import DecodeBackend
from edgellm.backends.forward import Chunk, Model
from edgellm.backends.placement import Placement
from edgellm.backends.schedule import Policy
from edgellm.backends.step_model import StepModel
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.engine.planner import Costs, PlannedChunk, plan_chunks
from edgellm.errors import OptionError
from edgellm.progress import Progress, ProgressCallback
from edgellm.store.bundle import PACKED

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a caller has done between chunks.

    Attributes:
        progress: told the tokens that are done.
        cancel: set it to stop; finished chunks stay in the sequence.
        on_hidden: called with each chunk's hidden states `[n, E]`, padding left out.
        on_place: called with where a chunk ran, as in `--prefill` and `--decode`, and its tokens.
        on_tasks: called with what ran when, some tasks at a time.
    """

    progress: ProgressCallback | None = None
    cancel: threading.Event | None = None
    on_hidden: Callable[[Floats], None] | None = None
    on_place: Callable[[str, int], None] | None = None
    on_tasks: Callable[[SequenceOf[TaskRecord]], None] | None = None

    def chunk_done(self, place: str, hidden: Floats, done: int, total: int) -> None:
        if self.on_place is not None:
            self.on_place(place, len(hidden))
        if self.on_hidden is not None:
            self.on_hidden(hidden)
        if self.progress is not None:
            self.progress(Progress("prefill", done, total, "tokens"))

    def tasks_done(self, records: SequenceOf[TaskRecord]) -> None:
        if self.on_tasks is not None:
            self.on_tasks(records)

    @contextmanager
    def host_task(self, place: str, chunk: int) -> Iterator[None]:
        """Note how long tokens take that go through all layers on the host at once."""
        start = time.perf_counter()
        yield
        self.tasks_done([TaskRecord(f"{place} step", chunk, "host", start, time.perf_counter())])


NO_HOOKS = Hooks()


class Prefill(Protocol):
    """What sessions need.

    Attributes:
        placement: where it runs.
        precision: of its weights.
    """

    precision: str

    @property
    def placement(self) -> Placement: ...

    def run(self, tokens: SequenceOf[int], sequence: Sequence, hooks: Hooks = NO_HOOKS) -> Floats:
        """Evaluate `tokens` at the end of `sequence`.

        Returns:
            The logits of the last token, `[V]`; no other row goes through the LM head.

        Raises:
            OptionError: there are none.
            ContextOverflowError, CacheFullError: they do not fit.
            CancelledError: `hooks.cancel` was set.
        """

    def logits(self, hidden: Floats) -> Floats:
        """The LM head on hidden states `[rows, E]`: `[rows, V]`."""


class ChunkedPrefill:
    """Chunks of static size through the segments of an execution provider.

    Args:
        host: takes the first tokens of a sequence where the precision leaves them to the host, and
            what is too short for a chunk where `costs` say so.
        costs: of the chunks and of `host`.
        policy: how the chunks of a prompt share the accelerator and the host.
        tails_only: the host takes nothing that fills a chunk, however cheap it would be there.
    """

    def __init__(
        self,
        model: Model,
        host: DecodeBackend,
        costs: Costs,
        *,
        policy: Policy = "serial",
        tails_only: bool = True,
    ) -> None:
        self.model = model
        self.costs = costs
        self._host = host
        self._policy = policy
        self._tails_only = tails_only
        self.precision = model.segments.precision

    @property
    def placement(self) -> Placement:
        return self.model.segments.placement

    def run(self, tokens: SequenceOf[int], sequence: Sequence, hooks: Hooks = NO_HOOKS) -> Floats:
        _check_not_empty(tokens)
        done, index, last = 0, 0, np.zeros(0, np.float32)

        def finished(place: str, hidden: Floats) -> None:
            nonlocal done, last
            done += len(hidden)
            last = hidden[-1:].copy()
            hooks.chunk_done(place, hidden, done, len(tokens))

        plan = self.plan(len(tokens), len(sequence))
        for on_host, group in itertools.groupby(plan, lambda chunk: chunk.size is None):
            chunks = list(_chunks(tokens[done:], group))
            if on_host:
                for i, chunk in enumerate(chunks, index):
                    with hooks.host_task(self._host.name, i):
                        hidden = self._host.forward(chunk.tokens, sequence, cancel=hooks.cancel)
                    finished(self._host.name, hidden)
            else:
                records = self.model.run(
                    chunks,
                    sequence,
                    policy=self._policy,
                    on_done=lambda hidden: finished(self.placement.place, hidden),
                    cancel=hooks.cancel,
                )
                hooks.tasks_done([replace(r, chunk=index + r.chunk) for r in records])
            index += len(chunks)
        logits: Floats = self.logits(last)[0]
        return logits

    def plan(self, count: int, start: int = 0) -> list[PlannedChunk]:
        """How `count` tokens are cut that come after `start` others."""
        first = min(count, max(0, self.model.segments.host_tokens - start))
        rest = plan_chunks(count - first, self.costs, tails_only=self._tails_only)
        return [PlannedChunk(None, first), *rest] if first else rest

    def logits(self, hidden: Floats) -> Floats:
        return self.model.head.logits(hidden)


class StepPrefill:
    """The fused step on many tokens at once, in C++ or in Triton kernels; nothing is padded."""

    precision = PACKED

    def __init__(self, model: StepModel, *, name: str) -> None:
        self.model = model
        self._name = name

    @property
    def placement(self) -> Placement:
        return Placement(self._name, {})

    def run(self, tokens: SequenceOf[int], sequence: Sequence, hooks: Hooks = NO_HOOKS) -> Floats:
        _check_not_empty(tokens)
        rows = self.model.best_rows or sequence.rows_at_once
        for start in range(0, len(tokens), rows):
            end = min(start + rows, len(tokens))
            with hooks.host_task(self._name, start // rows):
                hidden, logits = self.model.forward(
                    tokens[start:end],
                    sequence,
                    logit_rows=int(end == len(tokens)),
                    cancel=hooks.cancel,
                )
            hooks.chunk_done(self._name, hidden, end, len(tokens))
        last: Floats = logits[0]
        return last

    def logits(self, hidden: Floats) -> Floats:
        return self.model.logits(hidden)


def _check_not_empty(tokens: SequenceOf[int]) -> None:
    if len(tokens) == 0:
        raise OptionError("there are no tokens to evaluate; prefill takes 1 or more")


def _chunks(tokens: SequenceOf[int], plan: Iterator[PlannedChunk]) -> Iterator[Chunk]:
    """The tokens of each chunk; one of the host, which has no size, takes as many as it has."""
    for chunk in plan:
        yield Chunk(tokens[: chunk.count], chunk.size or chunk.count)
        tokens = tokens[chunk.count :]
