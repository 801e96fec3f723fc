"""Rows of a prompt on their way through the layers, in several steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span
from edgellm.cache.growth import Growth
from edgellm.cache.sequence import Sequence
from edgellm.engine.plan import Layers, Underway
from edgellm.kernels.step import LayerGroup

Floats = NDArray[np.float32]


class Passage:
    """Parked rows of a prompt, until they have passed the last layer.

    Their K and V are in blocks of their own behind a sequence, which does not know of them:
    dropping them leaves it as it was.

    Attributes:
        growth: the sequence with the rows behind it.
    """

    def __init__(self, base: Sequence, tokens: SequenceOf[int]) -> None:
        """Reserve room for `tokens` behind a sequence.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
        """
        self.growth = Growth(base, len(tokens))
        self._base = base
        self._tokens = tokens
        self._hidden: Floats | None = None  # states that enter the next layer
        self._passed = 0
        self._group: Layers | None = None  # layers of the last span

    @property
    def underway(self) -> Underway:
        """Number of parked rows, and of the layers that they have passed."""
        return Underway(len(self._tokens), self._passed)

    def continues(self, sequence: Sequence) -> bool:
        """Whether the rows still come next in `sequence`."""
        return sequence is self._base and len(sequence) == self.growth.start

    def span(self, layers: Layers, *, logit_rows: int, candidates: int) -> Span:
        """Return the rows as a span in their next layers; logits come after the last layer."""
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
        """Park the rows after the layers of the last span; returns whether no layers are left."""
        layers = self._group
        assert layers is not None
        self._hidden, self._passed = hidden, layers.end
        return layers.end == layers.all

    def land(self) -> Sequence:
        """See `Growth.land`."""
        return self.growth.land()

    def drop(self) -> None:
        """Give the blocks back."""
        self.growth.close()
