"""A chunk: rows of one or more sequences that go through segments of a static size together.

A segment knows nothing of positions or sequences; where each row belongs is known here.
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
    """What is to go through segments of a static size.

    Attributes:
        spans: of one sequence or of several, one behind the other; what is left is padding. All of
            them go through the same layers.
    """

    spans: SequenceOf[Span]
    size: int


@dataclass(frozen=True)
class RunningSpan:
    """A span of a chunk on its way: where its tokens are in their sequence and in the buffers.

    Attributes:
        entering: see `LayerGroup`.
    """

    sequence: Sequence
    tokens: SequenceOf[int]
    start: int
    rows: slice
    entering: Floats | None = None


@dataclass(frozen=True)
class RunningChunk:
    """A chunk on its way, and its buffers."""

    spans: SequenceOf[RunningSpan]
    buffers: ChunkBuffers

    @cached_property
    def tokens(self) -> list[int]:
        """Of all spans; what is behind them in the buffers is padding."""
        return [token for span in self.spans for token in span.tokens]


def begun(chunks: SequenceOf[Chunk], buffers: Callable[[int], ChunkBuffers]) -> list[RunningChunk]:
    """Chunks on their way to the ends of their sequences.

    Args:
        buffers: of a chunk, by its number.
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
