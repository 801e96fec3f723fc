"""Segment graphs as a back end: rows of all spans in chunks of static size."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.backend import Backend
from edgellm.backends.batch import Rows, Span, logits_of
from edgellm.backends.chunk import Chunk
from edgellm.backends.forward import Model
from edgellm.backends.placement import Placement
from edgellm.backends.planner import Costs, PlannedChunk, plan_chunks, shares_of_chunks
from edgellm.backends.schedule import Policy
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.errors import BundleError
from edgellm.kernels.sampling import Logits

Floats = NDArray[np.float32]
ShouldStop = Callable[[], bool] | None
# Chunks of a prompt in one step where several are on their way at once: so many that the
# accelerator hardly notices its end.
_CHUNKS = 8


@dataclass(frozen=True)
class _Group:
    """Rows of some spans that are computed together.

    Attributes:
        size: of the static chunk; None: on the host.
        owners: the number of the span that each part is of.
    """

    size: int | None
    owners: SequenceOf[int]
    parts: SequenceOf[Span]


@dataclass
class _Computed:
    """What is there of a span so far; see `Rows`."""

    hidden: list[Floats] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    tasks: list[TaskRecord] = field(default_factory=list)

    def add(self, place: str, rows: Floats) -> None:
        self.hidden.append(rows)
        self.places[place] = self.places.get(place, 0) + len(rows)


class ChunkedBackend:
    """Chunks of static size through the segments of an execution provider; see `Backend`.

    Rows of all spans are laid one behind the other, so that a chunk holds those of many sequences.

    Args:
        host: takes the first tokens of a sequence where the precision leaves them to the host, and
            what is too short for a chunk where `costs` say so; None where nothing is left to it.
        costs: of the chunks and of `host`.
        policy: how chunks share the accelerator and the host.
        tails_only: the host takes nothing that fills a chunk, however cheap it would be there.

    Raises:
        BundleError: the precision needs a host, and there is none.
    """

    exact_rows = False  # chunks of another size may be computed by another kernel of the provider

    def __init__(
        self,
        model: Model,
        host: Backend | None,
        costs: Costs,
        *,
        policy: Policy = "serial",
        tails_only: bool = True,
    ) -> None:
        self.model = model
        self.costs = costs
        self.host = host
        self._policy = policy
        self._tails_only = tails_only
        self._turn = threading.Lock()  # one call has the buffers of the chunks
        self.name = model.segments.placement.provider
        self.precision = model.segments.precision
        self.row_multiple = min(model.segments.chunk_sizes)
        if host is None and model.segments.host_tokens:
            raise BundleError(
                f"precision {self.precision} leaves the first {model.segments.host_tokens} tokens "
                "of a sequence to the host, which has no part with `decode` chunked; export the "
                "model again"
            )

    @property
    def placement(self) -> Placement:
        return self.model.segments.placement

    def rows_at_once(self, sequence: Sequence) -> int:
        chunks = 1 if self._policy == "serial" else _CHUNKS
        return chunks * max(self.model.segments.chunk_sizes)

    def rows_within(self, seconds: float) -> int:
        """Rows of as many whole chunks as take no longer; of one at least. Load does not matter."""
        size = max(self.model.segments.chunk_sizes)
        chunks = 1 if self._policy == "serial" else _CHUNKS
        return size * max(1, min(int(seconds / self.costs.chunks[size]), chunks))

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        with self._turn:
            return self._run(spans, should_stop)

    def _run(self, spans: SequenceOf[Span], should_stop: ShouldStop) -> list[Rows]:
        computed = [_Computed() for _ in spans]
        first = 0
        planned = self._groups(spans)
        for on_host, neighbours in itertools.groupby(planned, lambda group: group.size is None):
            groups = list(neighbours)
            compute = self._on_host if on_host else self._in_chunks
            compute(groups, first, computed, should_stop)
            first += len(groups)
        hidden = [np.concatenate(each.hidden) for each in computed]
        logits = self._logits_of(spans, hidden)
        return [
            Rows(rows, next_logits, each.places, each.tasks)
            for each, rows, next_logits in zip(computed, hidden, logits, strict=True)
        ]

    def plan(self, count: int, start: int = 0) -> list[PlannedChunk]:
        """How `count` tokens of one sequence are cut that come after `start` others."""
        first = self._host_tokens(count, start)
        rest = self._plan(count - first)
        return [PlannedChunk(None, first), *rest] if first else rest

    def logits(self, hidden: Floats) -> Floats:
        return self.model.head.logits(hidden)

    def _host_tokens(self, count: int, start: int) -> int:
        """How many of `count` tokens after `start` others the precision leaves to the host."""
        return min(count, max(0, self.model.segments.host_tokens - start))

    def _plan(self, count: int) -> list[PlannedChunk]:
        return plan_chunks(count, self.costs, tails_only=self._tails_only)

    def _groups(self, spans: SequenceOf[Span]) -> Iterator[_Group]:
        """What is computed together, in this order: each sequence's tokens are in theirs."""
        done = [self._host_tokens(len(span.tokens), len(span.sequence)) for span in spans]
        if any(done):
            owners = [number for number, count in enumerate(done) if count]
            parts = [Span(spans[n].sequence, spans[n].tokens[: done[n]]) for n in owners]
            yield _Group(None, owners, parts)
        left = [len(span.tokens) - count for span, count in zip(spans, done, strict=True)]
        plan = self._plan(sum(left))
        for chunk, shares in zip(plan, shares_of_chunks(plan, left), strict=True):
            parts = []
            for number, count in shares:
                span, begin = spans[number], done[number]
                parts.append(Span(span.sequence, span.tokens[begin : begin + count]))
                done[number] = begin + count
            yield _Group(chunk.size, [number for number, _ in shares], parts)

    def _on_host(
        self,
        groups: SequenceOf[_Group],
        first: int,
        computed: SequenceOf[_Computed],
        should_stop: ShouldStop,
    ) -> None:
        assert self.host is not None
        for index, group in enumerate(groups, first):
            results = self.host.run(group.parts, should_stop=should_stop)
            for owner, rows in zip(group.owners, results, strict=True):
                computed[owner].add(self.host.name, rows.hidden.copy())
                computed[owner].tasks += [replace(task, chunk=index) for task in rows.tasks]

    def _in_chunks(
        self,
        groups: SequenceOf[_Group],
        first: int,
        computed: SequenceOf[_Computed],
        should_stop: ShouldStop,
    ) -> None:
        finished = iter(groups)

        def on_done(hidden: Floats) -> None:
            group, row = next(finished), 0
            for owner, part in zip(group.owners, group.parts, strict=True):
                end = row + len(part.tokens)
                computed[owner].add(self.placement.place, hidden[row:end].copy())
                row = end

        records = self.model.run(
            [Chunk(group.parts, group.size or 0) for group in groups],
            # one has nothing to overlap with; handing it over costs 0.2 ms a layer (of two)
            policy=self._policy if len(groups) > 1 else "serial",
            on_done=on_done,
            should_stop=should_stop,
        )
        for record in records:
            for owner in groups[record.chunk].owners:
                computed[owner].tasks.append(replace(record, chunk=first + record.chunk))

    def _logits_of(
        self, spans: SequenceOf[Span], hidden: SequenceOf[Floats]
    ) -> list[SequenceOf[Logits]]:
        """After the last rows of each span, through the LM head together."""
        last = [
            rows[len(rows) - span.logit_rows :] for span, rows in zip(spans, hidden, strict=True)
        ]
        if not any(map(len, last)):
            return [[] for _ in spans]
        return logits_of(spans, self.logits(np.concatenate(last)))
