"""Input and results of a step, for prefill and decode alike, and the back ends that compute it.

All but that of chunks are the fused step: all layers of all rows in one call.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.providers import Placement
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.kernels.experts import ExpertMemory
from edgellm.kernels.head_blocks import HeadBlocks
from edgellm.kernels.linear import PackedWeights
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.sampling import Logits, rows_of_logits
from edgellm.kernels.sealed_blocks import Shortlists
from edgellm.kernels.step import LayerGroup, StepSpan
from edgellm.store.manifest import PACKED

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Span:
    """Rows of one sequence in a step: tokens that go to its end.

    Attributes:
        logit_rows: number of last tokens that go through the LM head.
        candidates: number of best logits that suffice in each row, at most `MOST_CANDIDATES`; 0:
            all logits are needed.
        group: layers that the rows go through, where others come before or after; None: all layers.
            With a group, tokens are counted into the sequence only after the last layer, and the
            sequence keeps its room meanwhile (`Growth`). Native kernels and chunks take a group.
        adapter: adapter of the rows, which other rows of the step need not have; None: none. Native
            kernels and Triton's take an adapter.
        adapter_start: number of first tokens that go without it.
        drafted: number of last tokens of its sequence that are a draft, see `Sequence.reserve`.
        answers: whether the rows are of an answer, which may read a part of their context
            (`kv_read`).
        shortlists: see `StepSpan`, where rows of answers read a part.
        all_states: whether the hidden states of all rows are asked for; else those of rows without
            logits may be zeros.
        heads: blocks of heads that the rows read in place of the sequence's, see `StepSpan`.
        shares: see `StepSpan`.
    """

    sequence: Sequence
    tokens: SequenceOf[int]
    logit_rows: int = 0
    candidates: int = 0
    group: LayerGroup | None = None
    adapter: AdapterWeights | None = None
    adapter_start: int = 0
    drafted: int = 0
    answers: bool = False
    shortlists: Shortlists = ()
    all_states: bool = True
    heads: SequenceOf[HeadBlocks | None] = ()
    shares: SequenceOf[Floats | None] = ()


@dataclass(frozen=True)
class Rows:
    """Results of one span.

    Attributes:
        hidden: hidden states after the final norm `[tokens, E]`; after a group of layers with
            others behind it, the rows that enter those, as the back end keeps them.
        logits: logits after each of the last `logit_rows` tokens.
        places: number of tokens computed in each place, by its name in `prefill` and `decode`.
        tasks: records of the tasks that ran.
    """

    hidden: Floats
    logits: SequenceOf[Logits]
    places: Mapping[str, int] = field(default_factory=dict)
    tasks: SequenceOf[TaskRecord] = ()


@contextmanager
def reserved(spans: SequenceOf[Span], *, windowed: bool = True) -> Iterator[None]:
    """Reserve room for the tokens of all spans; room not committed at the end is given back.

    Args:
        windowed: see `Sequence.reserve`.

    Raises:
        ContextOverflowError, CacheFullError: see `Sequence.reserve`.
    """
    counts: dict[Sequence, int] = {}
    drafted: dict[Sequence, int] = {}
    for span in spans:
        counts[span.sequence] = counts.get(span.sequence, 0) + len(span.tokens)
        drafted[span.sequence] = span.drafted
    try:
        for sequence, count in counts.items():
            sequence.reserve(count, windowed=windowed, drafted=drafted[sequence])
        yield
    finally:
        for sequence in counts:
            sequence.truncate(len(sequence))


def step_span(span: Span) -> StepSpan:
    """Return a span in the form of the fused steps, behind the tokens that its sequence has."""
    start = len(span.sequence)
    return StepSpan(
        tables=span.sequence.block_tables,
        tokens=span.tokens,
        start=start,
        logit_rows=span.logit_rows,
        adapter=span.adapter,
        adapter_start=span.adapter_start,
        states=span.sequence.states(start, start + len(span.tokens)),
        heads=span.heads or span.sequence.heads,
        shares=span.shares,
    )


def cut(spans: SequenceOf[Span], hidden: Floats, logits: Floats, *, threads: int = 1) -> list[Rows]:
    """Cut hidden states `[rows, E]` and logits `[logit rows, V]` of a batch into those of spans."""
    results, row = [], 0
    for span, after in zip(spans, logits_of(spans, logits, threads=threads), strict=True):
        end = row + len(span.tokens)
        results.append(Rows(hidden[row:end], after))
        row = end
    return results


def logits_of(
    spans: SequenceOf[Span], logits: Floats, *, threads: int = 1
) -> list[SequenceOf[Logits]]:
    """Cut the logits `[n, V]` of a batch into those of spans, all of a row or only the best."""
    wanted = [span.candidates for span in spans for _ in range(span.logit_rows)]
    rows = iter(rows_of_logits(logits, wanted, threads=threads))
    return [list(itertools.islice(rows, span.logit_rows)) for span in spans]


class Backend(Protocol):
    """A back end that is open.

    Attributes:
        name: name in the options `prefill` and `decode`.
        precision: precision of its weights.
        exact_rows: whether drafts can be checked: a token's result has the same bits however many
            tokens come with it, and several tokens together take less time than each alone.
        row_multiple: number of rows that a batch is padded to a multiple of.
        chunk_rows: rows of its largest chunk; 1 where rows need no chunk.
    """

    name: str
    precision: str
    exact_rows: bool
    row_multiple: int
    chunk_rows: int

    @property
    def placement(self) -> Placement:
        """Provider or kernels that the back end runs on."""

    def rows_at_once(self, sequence: Sequence) -> int:
        """Return the number of rows of a prompt that one step should have at most."""

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        """Compute the tokens of each span and count them into its sequence.

        Args:
            spans: spans of different sequences.
            should_stop: function asked between layers; an exception of it is raised again.

        Raises:
            ContextOverflowError: the tokens do not fit into the context.
            CacheFullError: no block is free; sequences keep the tokens computed before.
            CancelledError: `should_stop` returned true; sequences keep the tokens computed before.
        """

    def logits(self, hidden: Floats) -> Floats:
        """Return the LM head's logits `[rows, V]` for hidden states `[rows, E]`."""


def softcapped(logits: NDArray[np.float32], cap: float | None) -> NDArray[np.float32]:
    """Return `cap * tanh(logits / cap)`, or the same array without a cap; see arXiv:2408.00118."""
    if cap is None:
        return logits
    bounded: NDArray[np.float32] = np.float32(cap) * np.tanh(logits / np.float32(cap))
    return bounded


class StepBackend(ABC):
    """A back end of the fused step, in kernels that take packed weights; no rows are padded.

    Attributes:
        best_rows: number of tokens that one call computes best; None: as many as suit the cache.
        expert_memory: experts in memory, where there is a limit for them; else None.
    """

    name: str
    exact_rows: bool
    precision = PACKED
    row_multiple = chunk_rows = 1
    best_rows: int | None = None
    expert_memory: ExpertMemory | None = None

    @property
    def placement(self) -> Placement:
        return Placement(self.name, {})

    def rows_at_once(self, sequence: Sequence) -> int:
        return self.best_rows or sequence.rows_at_once

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        start = time.perf_counter()
        results = self._run(spans, should_stop)
        task = TaskRecord(f"{self.name} step", 0, "host", start, time.perf_counter())
        return [
            replace(rows, places={self.name: len(rows.hidden)}, tasks=(task,)) for rows in results
        ]

    @abstractmethod
    def _run(
        self, spans: SequenceOf[Span], should_stop: Callable[[], bool] | None
    ) -> list[Rows]: ...

    @abstractmethod
    def load_adapter(self, adapter: AdapterWeights) -> None:
        """Make an adapter ready for rows that have it.

        Raises:
            UnsupportedModelError: it changes what the kernels do not change.
            MemoryEstimateError: there is no room for it.
        """

    @abstractmethod
    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """Multiply rows `[rows, K]` to `[rows, N]` as the step does, for the self-test.

        Args:
            fine: whether activations keep 16 bits where others are rounded to fewer.
        """

    @abstractmethod
    def embed(self, tokens: SequenceOf[int]) -> Floats:
        """Return embedding rows `[n, E]`."""

    @abstractmethod
    def logits(self, hidden: Floats) -> Floats:
        """Return the LM head's logits `[rows, V]` for hidden states `[rows, E]`."""
