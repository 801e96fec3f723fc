"""Segment graphs as back ends: chunks of static size for prompts, and single tokens for decode."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Rows, Span, with_sums
from edgellm.backends.forward import Chunk, Model
from edgellm.backends.placement import Placement
from edgellm.backends.planner import Costs, PlannedChunk, plan_chunks
from edgellm.backends.schedule import Policy
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence

Floats = NDArray[np.float32]
# Chunks of a prompt in one step where several are on their way at once: so many that the
# accelerator hardly notices its end.
_CHUNKS = 8


class ChunkedBackend:
    """Chunks of static size through the segments of an execution provider; see `Backend`.

    Args:
        host: takes the first tokens of a sequence where the precision leaves them to the host, and
            what is too short for a chunk where `costs` say so.
        costs: of the chunks and of `host`.
        policy: how the chunks of a prompt share the accelerator and the host.
        tails_only: the host takes nothing that fills a chunk, however cheap it would be there.
    """

    exact_rows = False

    def __init__(
        self,
        model: Model,
        host: Backend,
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
        self.name = model.segments.placement.provider
        self.precision = model.segments.precision

    @property
    def placement(self) -> Placement:
        return self.model.segments.placement

    def rows_at_once(self, sequence: Sequence) -> int:
        chunks = 1 if self._policy == "serial" else _CHUNKS
        return chunks * max(self.model.segments.chunk_sizes)

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        return [self._run(span, should_stop) for span in spans]

    def _run(self, span: Span, should_stop: Callable[[], bool] | None) -> Rows:
        tokens, sequence = span.tokens, span.sequence
        hidden: list[Floats] = []
        places: dict[str, int] = {}
        tasks: list[TaskRecord] = []

        def finished(place: str, rows: Floats) -> None:
            hidden.append(rows.copy())
            places[place] = places.get(place, 0) + len(rows)

        index, done = 0, 0
        plan = self.plan(len(tokens), len(sequence))
        for on_host, group in itertools.groupby(plan, lambda chunk: chunk.size is None):
            chunks = list(_chunks(tokens[done:], group))
            if on_host:
                for chunk in chunks:
                    part = Span(sequence, chunk.tokens)
                    (rows,) = self._host.run([part], should_stop=should_stop)
                    tasks += [replace(task, chunk=index) for task in rows.tasks]
                    finished(self._host.name, rows.hidden)
            else:
                records = self.model.run(
                    chunks,
                    sequence,
                    policy=self._policy,
                    on_done=lambda rows: finished(self.placement.place, rows),
                    should_stop=should_stop,
                )
                tasks += [replace(record, chunk=index + record.chunk) for record in records]
            index += len(chunks)
            done += sum(len(chunk.tokens) for chunk in chunks)
        states = np.concatenate(hidden)
        last = states[len(states) - span.logit_rows :]
        logits = with_sums(self.logits(last)) if span.logit_rows else []
        return Rows(states, logits, places, tasks)

    def plan(self, count: int, start: int = 0) -> list[PlannedChunk]:
        """How `count` tokens are cut that come after `start` others."""
        first = min(count, max(0, self.model.segments.host_tokens - start))
        rest = plan_chunks(count - first, self.costs, tails_only=self._tails_only)
        return [PlannedChunk(None, first), *rest] if first else rest

    def logits(self, hidden: Floats) -> Floats:
        return self.model.head.logits(hidden)


class TokenBackend:
    """Segments at chunk size 1 in ONNX Runtime, which need no compiler and no device."""

    exact_rows = False

    def __init__(self, model: Model, *, name: str) -> None:
        self._model = model
        self.name = name
        self.precision = model.segments.precision

    @property
    def placement(self) -> Placement:
        return self._model.segments.placement

    def rows_at_once(self, sequence: Sequence) -> int:
        return sequence.rows_at_once

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        return [self._run(span, should_stop) for span in spans]

    def _run(self, span: Span, should_stop: Callable[[], bool] | None) -> Rows:
        start = time.perf_counter()
        states = np.concatenate(
            [
                self._model.forward([token], span.sequence, chunk=1, should_stop=should_stop).copy()
                for token in span.tokens
            ]
        )
        last = states[len(states) - span.logit_rows :]
        logits = with_sums(self.logits(last)) if span.logit_rows else []
        task = TaskRecord(f"{self.name} step", 0, "host", start, time.perf_counter())
        return Rows(states, logits, {self.name: len(states)}, [task])

    def logits(self, hidden: Floats) -> Floats:
        return self._model.head.logits(hidden)


def _chunks(tokens: SequenceOf[int], plan: Iterator[PlannedChunk]) -> Iterator[Chunk]:
    """The tokens of each chunk; one of the host, which has no size, takes as many as it has."""
    for chunk in plan:
        yield Chunk(tokens[: chunk.count], chunk.size or chunk.count)
        tokens = tokens[chunk.count :]
