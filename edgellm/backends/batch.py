"""What one step computes: rows of many sequences, for prefill and decode alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.kernels.sampling import Logits, rows_of_logits
from edgellm.kernels.step import LayerGroup, StepSpan

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Span:
    """Rows of one sequence: tokens that go to its end.

    Attributes:
        logit_rows: the last so many of them go through the LM head.
        candidates: so many of the best logits of each row will do, at most `MOST_CANDIDATES`; 0:
            all are needed.
        group: the layers that they go through, where others come before or after; None: all. Then
            nothing is counted into the sequence before the last one, which keeps its room
            meanwhile (`Growth`). Native kernels and chunks take one.
    """

    sequence: Sequence
    tokens: SequenceOf[int]
    logit_rows: int = 0
    candidates: int = 0
    group: LayerGroup | None = None


@dataclass(frozen=True)
class Rows:
    """What was computed of a span.

    Attributes:
        hidden: states after the final norm `[tokens, E]`; of a group of layers with others behind
            it, what enters those, as the back end has it.
        logits: after each of the last rows.
        places: how many tokens were computed where, as `prefill` and `decode` name it.
        tasks: what ran when.
    """

    hidden: Floats
    logits: SequenceOf[Logits]
    places: Mapping[str, int] = field(default_factory=dict)
    tasks: SequenceOf[TaskRecord] = ()


@contextmanager
def reserved(spans: SequenceOf[Span], *, windowed: bool = True) -> Iterator[None]:
    """Make room for the tokens of all spans; what has not been committed at the end is given back.

    Args:
        windowed: see `Sequence.reserve`.

    Raises:
        ContextOverflowError, CacheFullError: see `Sequence.reserve`.
    """
    counts: dict[Sequence, int] = {}
    for span in spans:
        counts[span.sequence] = counts.get(span.sequence, 0) + len(span.tokens)
    try:
        for sequence, count in counts.items():
            sequence.reserve(count, windowed=windowed)
        yield
    finally:
        for sequence in counts:
            sequence.truncate(len(sequence))


def step_span(span: Span) -> StepSpan:
    """A span as the fused steps take it, behind what its sequence has."""
    return StepSpan(
        tables=span.sequence.block_tables,
        tokens=span.tokens,
        start=len(span.sequence),
        logit_rows=span.logit_rows,
    )


def cut(spans: SequenceOf[Span], hidden: Floats, logits: Floats, *, threads: int = 1) -> list[Rows]:
    """Hidden states `[rows, E]` and logits `[logit rows, V]` of a batch as those of each span."""
    results, row = [], 0
    for span, after in zip(spans, logits_of(spans, logits, threads=threads), strict=True):
        end = row + len(span.tokens)
        results.append(Rows(hidden[row:end], after))
        row = end
    return results


def logits_of(
    spans: SequenceOf[Span], logits: Floats, *, threads: int = 1
) -> list[SequenceOf[Logits]]:
    """Rows of logits `[n, V]` of a batch as those of each span, or the best of them."""
    wanted = [span.candidates for span in spans for _ in range(span.logit_rows)]
    rows = iter(rows_of_logits(logits, wanted, threads=threads))
    return [list(itertools.islice(rows, span.logit_rows)) for span in spans]
