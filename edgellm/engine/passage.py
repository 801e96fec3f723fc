"""Rows of a prompt on their way through the layers, in several steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span
from edgellm.cache.growth import Growth
from edgellm.cache.sequence import Sequence
from edgellm.engine.admission import Underway
from edgellm.engine.prompt_rows import Layers
from edgellm.kernels.step import LayerGroup

Floats = NDArray[np.float32]


class Passage:
    """What is kept of rows that rest between two layers, until they have passed the last one.

    Their K and V are in blocks of their own behind a sequence, which does not know of them: if they
    are dropped, nothing has happened to it.

    Attributes:
        growth: the sequence with the rows behind it.
    """

    def __init__(self, base: Sequence, tokens: SequenceOf[int]) -> None:
        """Make room for `tokens` behind a sequence.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
        """
        self.growth = Growth(base, len(tokens))
        self._base = base
        self._tokens = tokens
        self._hidden: Floats | None = None  # what enters the next layer
        self._passed = 0
        self._group: Layers | None = None  # on their way

    @property
    def underway(self) -> Underway:
        """What the scheduler has to know."""
        return Underway(len(self._tokens), self._passed)

    def continues(self, sequence: Sequence) -> bool:
        """Whether the rows are still those that come next there."""
        return sequence is self._base and len(sequence) == self.growth.start

    def span(self, layers: Layers, *, logit_rows: int, candidates: int) -> Span:
        """The rows in their next layers; logits come behind the last one."""
        assert layers.first == self._passed
        self._group = layers
        return Span(
            self.growth,
            self._tokens,
            logit_rows=logit_rows if layers.end == layers.all else 0,
            candidates=candidates,
            group=LayerGroup(layers=range(layers.first, layers.end), entering=self._hidden),
        )

    def take(self, hidden: Floats) -> bool:
        """Rest behind the layers of the last span, with what enters the next; whether there are
        none."""
        layers = self._group
        assert layers is not None
        self._hidden, self._passed = hidden, layers.end
        return layers.end == layers.all

    def land(self) -> Sequence:
        """See `Growth.land`."""
        return self.growth.land()

    def drop(self) -> None:
        """Give the blocks back; again, if an interrupt came."""
        self.growth.close()
