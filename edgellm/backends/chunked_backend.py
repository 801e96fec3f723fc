"""The back ends of segment graphs: rows of all spans in static chunks, or single tokens."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Backend, Rows, Span, logits_of
from edgellm.backends.chunk import Chunk
from edgellm.backends.forward import Model
from edgellm.backends.planner import Costs, PlannedChunk, plan_chunks, shares_of_chunks
from edgellm.backends.providers import Placement
from edgellm.backends.schedule import Policy
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.errors import BundleError
from edgellm.kernels.sampling import Logits
from edgellm.kernels.step import LayerGroup

Floats = NDArray[np.float32]
ShouldStop = Callable[[], bool] | None
# Chunks of a prompt in one step where several are on their way at once: enough to keep the
# accelerator from idling long at the end of the step.
_CHUNKS = 8


class ChunkedBackend:
    """Chunks of static size through the segments of an execution provider; see `Backend`.

    Rows of all spans are laid one behind the other, so that a chunk holds rows of many sequences. A
    span that goes through a group of layers comes alone, in chunks of its own.

    Args:
        host: back end for the first tokens of a sequence where the precision leaves them to the
            host, and for tails too short for a chunk where `costs` say so; None where no token is
            left to the host.
        costs: seconds of the chunks and of `host`.
        policy: order in which chunks share the accelerator and the host.
        tails_only: whether the host takes only rows that fill no chunk, however cheap more would
            be there.

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
        self._turn = threading.Lock()  # held by the one call that uses the buffers of the chunks
        self.name = model.segments.placement.provider
        self.precision = model.segments.precision
        self.row_multiple = min(model.segments.chunk_sizes)
        self.chunk_rows = max(model.segments.chunk_sizes)
        self._most_rows = self.chunk_rows * (1 if policy == "serial" else _CHUNKS)
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
        return self._most_rows

    def rows_within(self, seconds: float, *, count: int, start: int) -> int:
        """Return the number of rows in the first chunks of a prompt that take at most `seconds`.

        The chunks are those that `count` tokens after `start` others are cut into, one at least and
        as many as one step takes at most. A part that ends behind a chunk changes no other chunk.
        """
        rows = in_chunks = 0
        for chunk in self.plan(count, start):
            seconds -= self.costs.seconds([chunk])
            if in_chunks and (seconds < 0 or in_chunks + chunk.count > self._most_rows):
                break
            rows += chunk.count
            in_chunks += 0 if chunk.size is None else chunk.count
        return rows

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        with self._turn:
            if spans and spans[0].group is not None:
                (span,) = spans
                return [self._run_group(span, spans[0].group, should_stop)]
            return self._run(spans, should_stop)

    def _run(self, spans: SequenceOf[Span], should_stop: ShouldStop) -> list[Rows]:
        computed = [Computed() for _ in spans]
        first = 0
        for on_host, portions in _by_place(self._portions(spans)):
            compute = self._on_host if on_host else self._in_chunks
            compute(portions, first, computed, should_stop)
            first += len(portions)
        hidden = [np.concatenate(each.hidden) for each in computed]
        logits = self._logits_of(spans, hidden)
        return [
            Rows(rows, next_logits, each.places, each.tasks)
            for each, rows, next_logits in zip(computed, hidden, logits, strict=True)
        ]

    def _run_group(self, span: Span, group: LayerGroup, should_stop: ShouldStop) -> Rows:
        """Run one span through a group of layers; only the last group counts its tokens.

        The host takes its rows through all layers at once: rows before the chunks with the first
        group, so that the chunks can attend to them, and rows behind the chunks with the last one.
        """
        is_first = group.layers.start == 0
        is_last = group.layers.stop == self.model.config.layer_count
        start, computed, index, behind, done = len(span.sequence), Computed(), 0, False, False
        try:
            for on_host, portions in _by_place(self._portions([span])):
                if not on_host:
                    self._in_chunks(portions, index, [computed], should_stop)
                    behind = True
                elif is_last if behind else is_first:
                    self._on_host(portions, index, [computed], should_stop)
                else:
                    self._wait(portions, span, computed, behind=behind)
                index += len(portions)
            done = is_last
        finally:
            if not done:
                span.sequence.truncate(start)
        hidden = computed.joined()
        (logits,) = self._logits_of([span], [hidden])
        return Rows(hidden, logits, computed.places, computed.tasks)

    def _wait(
        self, portions: SequenceOf[Portion], span: Span, computed: Computed, *, behind: bool
    ) -> None:
        """Add rows of a span that the host computes with another group of layers.

        Before the chunks, `entering` has the host's results; `behind` the chunks, rows are zeros.
        """
        assert self.host is not None
        for tokens in (part.tokens for portion in portions for part in portion.parts):
            rows = np.zeros((len(tokens), self.model.config.hidden_size), np.float32)
            if not behind:
                assert span.group is not None
                assert span.group.entering is not None
                rows[:] = span.group.entering[computed.count :][: len(tokens), : rows.shape[1]]
                span.sequence.commit(tokens)
            computed.add(self.host.name, rows)

    def plan(self, count: int, start: int = 0) -> list[PlannedChunk]:
        """Plan the chunks of `count` tokens of one sequence that come after `start` others."""
        first = self._host_tokens(count, start)
        rest = self._plan(count - first)
        return [PlannedChunk(None, first), *rest] if first else rest

    def logits(self, hidden: Floats) -> Floats:
        return self.model.head.logits(hidden)

    def _host_tokens(self, count: int, start: int) -> int:
        """Return how many of `count` tokens after `start` others the host computes first."""
        return min(count, max(0, self.model.segments.host_tokens - start))

    def _plan(self, count: int, *, tails_only: bool = False) -> list[PlannedChunk]:
        return plan_chunks(count, self.costs, tails_only=tails_only or self._tails_only)

    def _portions(self, spans: SequenceOf[Span]) -> Iterator[Portion]:
        """Iterate the portions to compute, in order; tokens of each sequence keep their order."""
        done = [self._host_tokens(len(span.tokens), len(span.sequence)) for span in spans]
        if any(done):
            owners = [number for number, count in enumerate(done) if count]
            parts = [part_of(spans[n], 0, done[n], on_host=True) for n in owners]
            yield Portion(None, owners, parts)
        left = [len(span.tokens) - count for span, count in zip(spans, done, strict=True)]
        # of a span with a group of layers the host takes only a tail: no step waits for more
        plan = self._plan(sum(left), tails_only=any(span.group is not None for span in spans))
        for chunk, shares in zip(plan, shares_of_chunks(plan, left), strict=True):
            parts = []
            for number, count in shares:
                on_host = chunk.size is None
                parts.append(part_of(spans[number], done[number], count, on_host=on_host))
                done[number] += count
            yield Portion(chunk.size, [number for number, _ in shares], parts)

    def _on_host(
        self,
        portions: SequenceOf[Portion],
        first: int,
        computed: SequenceOf[Computed],
        should_stop: ShouldStop,
    ) -> None:
        assert self.host is not None
        for index, portion in enumerate(portions, first):
            results = self.host.run(portion.parts, should_stop=should_stop)
            for owner, rows in zip(portion.owners, results, strict=True):
                computed[owner].add(self.host.name, rows.hidden.copy())
                computed[owner].tasks += [replace(task, chunk=index) for task in rows.tasks]

    def _in_chunks(
        self,
        portions: SequenceOf[Portion],
        first: int,
        computed: SequenceOf[Computed],
        should_stop: ShouldStop,
    ) -> None:
        finished = iter(portions)

        def on_done(hidden: Floats) -> None:
            portion, row = next(finished), 0
            for owner, part in zip(portion.owners, portion.parts, strict=True):
                end = row + len(part.tokens)
                computed[owner].add(self.placement.place, hidden[row:end].copy())
                row = end

        records = self.model.run(
            [Chunk(portion.parts, portion.size or 0) for portion in portions],
            # one chunk has nothing to overlap with; handing it over costs 0.2 ms a layer (of two)
            policy=self._policy if len(portions) > 1 else "serial",
            on_done=on_done,
            should_stop=should_stop,
        )
        for record in records:
            for owner in portions[record.chunk].owners:
                computed[owner].tasks.append(replace(record, chunk=first + record.chunk))

    def _logits_of(
        self, spans: SequenceOf[Span], hidden: SequenceOf[Floats]
    ) -> list[SequenceOf[Logits]]:
        """Return the logits after the last rows of each span, from one call of the LM head."""
        last = [
            rows[len(rows) - span.logit_rows :] for span, rows in zip(spans, hidden, strict=True)
        ]
        if not any(map(len, last)):
            return [[] for _ in spans]
        return logits_of(spans, self.logits(np.concatenate(last)))


def _by_place(portions: Iterable[Portion]) -> Iterator[tuple[bool, list[Portion]]]:
    """Group neighbouring portions that are all on the host (True), or all in chunks (False)."""
    for on_host, neighbours in itertools.groupby(portions, lambda portion: portion.size is None):
        yield on_host, list(neighbours)


@dataclass(frozen=True)
class Portion:
    """Rows of some spans that are computed together.

    Attributes:
        size: size of the static chunk; None: the host computes the rows.
        owners: for each part, the number of the span that it belongs to.
        parts: the rows, as one span for each owner.
    """

    size: int | None
    owners: SequenceOf[int]
    parts: SequenceOf[Span]


@dataclass
class Computed:
    """Results computed so far for one span; see `Rows`."""

    hidden: list[Floats] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    tasks: list[TaskRecord] = field(default_factory=list)

    def add(self, place: str, rows: Floats) -> None:
        self.hidden.append(rows)
        self.places[place] = self.places.get(place, 0) + len(rows)

    @property
    def count(self) -> int:
        return sum(map(len, self.hidden))

    def joined(self) -> Floats:
        """Return all rows; host rows are zero-padded to the width of rows kept between layers."""
        width = max(rows.shape[1] for rows in self.hidden)
        padded = [np.pad(rows, ((0, 0), (0, width - rows.shape[1]))) for rows in self.hidden]
        return np.concatenate(padded)


def part_of(span: Span, begin: int, count: int, *, on_host: bool) -> Span:
    """Return `count` rows of a span from row `begin` on; host rows go through all layers.

    The states of a part's rows are asked for where those of one of them are.
    """
    end, group = begin + count, None if on_host else span.group
    asked = span.all_states or end > len(span.tokens) - span.logit_rows
    if group is not None and group.entering is not None:
        group = replace(group, entering=group.entering[begin:end])
    tokens = span.tokens[begin:end]
    return Span(span.sequence, tokens, group=group, all_states=asked or on_host)


class TokenBackend:
    """Segments at chunk size 1 in ONNX Runtime, one token after the other; see `Backend`."""

    exact_rows = False
    row_multiple = chunk_rows = 1

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
        (logits,) = logits_of([span], self.logits(last)) if span.logit_rows else [()]
        task = TaskRecord(f"{self.name} step", 0, "host", start, time.perf_counter())
        return Rows(states, logits, {self.name: len(states)}, [task])

    def logits(self, hidden: Floats) -> Floats:
        return self._model.head.logits(hidden)
