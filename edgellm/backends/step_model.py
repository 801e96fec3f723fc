"""A model as one step through all layers: what C++ and Triton kernels have in common."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows, Span
from edgellm.kernels.linear import PackedWeights

Floats = NDArray[np.float32]


class StepModel(Protocol):
    """`NativeModel` or `TritonModel`.

    Attributes:
        best_rows: tokens that one call computes best; None: what suits the cache.
    """

    best_rows: int | None

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        """See `Backend.run`."""

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """A product `[rows, K]` to `[rows, N]` as the step computes it, for the self-test.

        Args:
            fine: with activations of 16 bits, where others are rounded to fewer.
        """

    def logits(self, hidden: Floats) -> Floats:
        """The LM head on hidden states `[rows, E]`: `[rows, V]`."""
