"""What computes batches: one verb for prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows, Span
from edgellm.backends.placement import Placement
from edgellm.cache.sequence import Sequence

Floats = NDArray[np.float32]


class Backend(Protocol):
    """A back end that is open.

    Attributes:
        name: as in `prefill` and `decode`.
        precision: of its weights.
        exact_rows: whether a token's result has the same bits however many come with it, and some
            of them take less than each alone: whether drafts can be checked.
        row_multiple: a batch computes a multiple of so many rows; what they lack is padding.
        chunk_rows: of its largest chunk; 1 where rows need none.
    """

    name: str
    precision: str
    exact_rows: bool
    row_multiple: int
    chunk_rows: int

    @property
    def placement(self) -> Placement:
        """Where it runs."""

    def rows_at_once(self, sequence: Sequence) -> int:
        """Rows of a prompt that one step should have at most."""

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        """Compute the tokens of each span and count them into its sequence.

        Args:
            spans: of different sequences.
            should_stop: asked between layers; what it raises is raised again.

        Raises:
            ContextOverflowError: tokens do not fit into the context.
            CacheFullError: no block is free; sequences have what was computed before.
            CancelledError: it was stopped, likewise.
        """

    def logits(self, hidden: Floats) -> Floats:
        """The LM head on hidden states `[rows, E]`: `[rows, V]`."""
