"""A model as one step through all layers: what C++ and Triton kernels have in common."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.sequence import Sequence
from edgellm.kernels.linear import PackedWeights
from edgellm.kernels.sampling import Logits

Floats = NDArray[np.float32]


class StepModel(Protocol):
    """`NativeModel` or `TritonModel`.

    Attributes:
        best_rows: tokens that one call computes best; None: what suits the cache.
    """

    best_rows: int | None

    def forward(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        logit_rows: int = 0,
        cancel: threading.Event | None = None,
    ) -> tuple[Floats, Floats]:
        """Run tokens at the end of `sequence` and count them into it.

        Returns:
            Hidden states after the final norm `[len(tokens), E]`, and the logits of the last
            `logit_rows` tokens `[logit_rows, V]`.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
            CancelledError: `cancel` was set; the sequence is as it was.
        """

    def best(self, token: int, sequence: Sequence) -> Logits | None:
        """See `DecodeBackend.best`."""

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """A product `[rows, K]` to `[rows, N]` as the step computes it, for the self-test.

        Args:
            fine: with activations of 16 bits, where others are rounded to fewer.
        """

    def logits(self, hidden: Floats) -> Floats:
        """The LM head on hidden states `[rows, E]`: `[rows, V]`."""
