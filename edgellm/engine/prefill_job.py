"""Rows of a prompt on their way: through the layers in several steps, or on another device."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Span
from edgellm.cache.sequence import Growth, Sequence
from edgellm.engine.plan import Layers, Underway
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.step import LayerGroup

Floats = NDArray[np.float32]


class PrefillJob:
    """Rows of a prompt whose K and V are in blocks of their own until all layers are computed.

    The sequence that they come next in does not know of them: dropping them leaves it as it was.

    Attributes:
        growth: the sequence with the rows behind it.
        away: whether a thread beside the engine's computes the rows, and writes to the blocks.
        dropped: whether the rows are not wanted.
    """

    def __init__(
        self,
        base: Sequence,
        tokens: SequenceOf[int],
        *,
        adapter: AdapterWeights | None = None,
        adapter_start: int = 0,
    ) -> None:
        """Reserve room for `tokens` behind a sequence.

        Args:
            adapter, adapter_start: see `Span`.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
        """
        self.growth = Growth(base, len(tokens))
        self.away = self.dropped = False
        self._base = base
        self._tokens = tokens
        self._adapter, self._adapter_start = adapter, adapter_start
        self._hidden: Floats | None = None  # states that enter the next layer
        self._passed = 0
        self._layers: Layers | None = None  # layers of the last span; None: all

    @property
    def underway(self) -> Underway:
        """Number of rows, and of the layers that they have passed."""
        count = 0 if self._layers is None else self._layers.all
        return Underway(len(self._tokens), self._passed, count)

    def continues(self, sequence: Sequence) -> bool:
        """Whether the rows still come next in `sequence`."""
        return sequence is self._base and len(sequence) == self.growth.start

    def span(self, layers: Layers | None, *, logit_rows: int, candidates: int) -> Span:
        """Return the rows as a span in their next layers; logits come after the last layer.

        Args:
            layers: the layers; None: all.
        """
        self._layers, group = layers, None
        if layers is not None:
            group = LayerGroup(layers=range(layers.first, layers.end), entering=self._hidden)
            logit_rows = logit_rows if layers.end == layers.all else 0
        return Span(
            self.growth,
            self._tokens,
            logit_rows,
            candidates,
            group,
            self._adapter,
            self._adapter_start,
        )

    def take(self, hidden: Floats) -> bool:
        """Park the rows after the layers of the last span; returns whether no layers are left."""
        layers = self._layers
        if layers is None or layers.end == layers.all:
            return True
        self._hidden, self._passed = hidden, layers.end
        return False

    def land(self) -> Sequence:
        """See `Growth.land`."""
        return self.growth.land()

    def drop(self) -> None:
        """Give the blocks back, at the latest with `returned`; what is computed can be found."""
        self.dropped = True
        if not self.away:
            self.land().close()

    def returned(self) -> None:
        """Note that the thread beside the engine's has ended."""
        self.away = False
        if self.dropped:
            self.drop()
