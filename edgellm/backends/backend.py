"""Interface of the back ends that compute batches: one method for prefill and decode."""

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
