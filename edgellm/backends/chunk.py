"""A chunk: rows of one or more sequences that go through segments of a static size together.

A segment knows nothing of positions or sequences; a chunk knows to which of them each row belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span
from edgellm.backends.segments import ChunkBuffers
from edgellm.cache.sequence import Sequence

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Chunk:
    """Rows that are to go through segments of a static size together.

    Attributes:
        spans: spans of one sequence or of several, one behind the other, all through the same
            layers; rows left over are padding.
        size: number of rows of the segments.
    """

    spans: SequenceOf[Span]
    size: int

    @property
    def asked(self) -> bool:
        """Whether hidden states of some rows are asked for."""
        return any(span.all_states for span in self.spans)


@dataclass(frozen=True)
class RunningSpan:
    """A span of a running chunk, with the place of its tokens in the sequence and the buffers.

    Attributes:
        start: position of the first token in the sequence.
        rows: rows of the buffers.
        entering: see `LayerGroup`.
    """

    sequence: Sequence
    tokens: SequenceOf[int]
    start: int
    rows: slice
    entering: Floats | None = None


@dataclass(frozen=True)
class RunningChunk:
    """A chunk on its way through the segments, and its buffers."""

    spans: SequenceOf[RunningSpan]
    buffers: ChunkBuffers

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of all spans; rows behind them in the buffers are padding."""
        return [token for span in self.spans for token in span.tokens]


def begun(chunks: SequenceOf[Chunk], buffers: Callable[[int], ChunkBuffers]) -> list[RunningChunk]:
    """Begin chunks: place their spans at the ends of the sequences and in buffers.

    Args:
        buffers: function that gives the buffers of a chunk, by its number.
    """
    ends: dict[Sequence, int] = {}
    running = []
    for index, chunk in enumerate(chunks):
        spans, row = [], 0
        for span in chunk.spans:
            count, start = len(span.tokens), ends.get(span.sequence, len(span.sequence))
            entering = None if span.group is None else span.group.entering
            rows = slice(row, row + count)
            spans.append(RunningSpan(span.sequence, span.tokens, start, rows, entering))
            ends[span.sequence] = start + count
            row += count
        running.append(RunningChunk(spans, buffers(index)))
    return running
