"""A model as one step through all layers: the interface of models in C++ and Triton kernels."""

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
    """A model in kernels that take packed weights: `NativeModel` or `TritonModel`.

    Attributes:
        best_rows: number of tokens that one call computes best; None: as many as suit the cache.
    """

    best_rows: int | None

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        """See `Backend.run`."""

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """Multiply rows `[rows, K]` to `[rows, N]` as the step does, for the self-test.

        Args:
            fine: whether activations keep 16 bits where others are rounded to fewer.
        """

    def logits(self, hidden: Floats) -> Floats:
        """Return the LM head's logits `[rows, V]` for hidden states `[rows, E]`."""
