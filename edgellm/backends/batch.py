"""What one step computes: rows of many sequences, for prefill and decode alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.kernels.sampling import Logits, log_sum_exp
from edgellm.kernels.step import StepSpan

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Span:
    """Rows of one sequence: tokens that go to its end.

    Attributes:
        logit_rows: the last so many of them go through the LM head.
        candidates: the `MOST_CANDIDATES` best logits of its only row will do, where they are found
            sooner.
    """

    sequence: Sequence
    tokens: SequenceOf[int]
    logit_rows: int = 0
    candidates: bool = False


@dataclass(frozen=True)
class Rows:
    """What was computed of a span.

    Attributes:
        hidden: states after the final norm `[tokens, E]`.
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
    counts: Counter[Sequence] = Counter()
    for span in spans:
        counts[span.sequence] += len(span.tokens)
    with ExitStack() as stack:
        for sequence, count in counts.items():
            stack.enter_context(sequence.reserved(count, windowed=windowed))
        yield


def step_span(span: Span) -> StepSpan:
    """A span as the fused steps take it, behind what its sequence has."""
    return StepSpan(
        tables=span.sequence.block_tables,
        tokens=span.tokens,
        start=len(span.sequence),
        logit_rows=span.logit_rows,
    )


def cut(spans: SequenceOf[Span], hidden: Floats, logits: Floats) -> list[Rows]:
    """Hidden states `[rows, E]` and logits `[logit rows, V]` of a batch as those of each span."""
    results, row, logit = [], 0, 0
    for span in spans:
        end, last = row + len(span.tokens), logit + span.logit_rows
        results.append(Rows(hidden[row:end], with_sums(logits[logit:last])))
        row, logit = end, last
    return results


def with_sums(logits: Floats) -> list[Logits]:
    """Rows of logits `[n, V]`, each with what makes probabilities of it."""
    return [Logits(row, log_sum_exp(row)) for row in logits]
