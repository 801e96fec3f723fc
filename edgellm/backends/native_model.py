"""A model in the native kernels: any few tokens through all layers in one call."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.softcap import softcapped
from edgellm.cache.sequence import Sequence
from edgellm.errors import CancelledError
from edgellm.kernels.linear import PackedWeights, rows_of
from edgellm.kernels.linear.native import linear
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sampling import Logits
from edgellm.kernels.step import FusedStep, Weights

Floats = NDArray[np.float32]
# Tokens that take so long that a question before each layer, 0.5 µs, is nothing.
_MANY = 64


class PackedHead:
    """The LM head and the embedding in packed weights; see `Head` in `segments.py`."""

    def __init__(self, library: ctypes.CDLL, weights: Weights, *, threads: int) -> None:
        self._library = library
        self._weights = weights
        self._threads = threads

    def embed(self, tokens: SequenceOf[int]) -> Floats:
        """Embedding rows `[n, E]`."""
        return rows_of(self._weights.embedding, tokens)

    def logits(self, hidden: Floats) -> Floats:
        """`[rows, E]` to `[rows, V]`."""
        head = self._weights.head
        logits = linear(self._library, hidden, head, fine=True, threads=self._threads)
        return softcapped(logits, self._weights.logit_softcap)


class NativeModel:
    """Runs tokens through the fused step on the shared KV cache."""

    best_rows: int | None = None

    def __init__(
        self, library: ctypes.CDLL, weights: Weights, ropes: SequenceOf[RopeTable], *, threads: int
    ) -> None:
        """`ropes`: the tables that layers name by their index, for the whole context."""
        self.head = PackedHead(library, weights, threads=threads)
        self._library = library
        self._step = FusedStep(library, weights, ropes)
        self._threads = threads

    def forward(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        logit_rows: int = 0,
        cancel: threading.Event | None = None,
    ) -> tuple[Floats, Floats]:
        """See `StepModel.forward`."""
        with sequence.reserved(len(tokens)):
            sequence.use_host()
            result = self._step.run(
                sequence.views,
                tokens,
                len(sequence),
                logit_rows=logit_rows,
                threads=self._threads,
                should_stop=_stopped_by(cancel, len(tokens)),
            )
            if result is None:
                raise CancelledError("cancelled between two layers")
            sequence.commit(tokens)
        return result

    def best(self, token: int, sequence: Sequence) -> Logits | None:
        """None: all logits are in memory at once."""
        return None

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """See `StepModel.linear`."""
        return linear(self._library, x, weight, fine=fine, threads=self._threads)

    def logits(self, hidden: Floats) -> Floats:
        """See `StepModel.logits`."""
        return self.head.logits(hidden)


def _stopped_by(cancel: threading.Event | None, tokens: int) -> Callable[[], bool] | None:
    """What C++ asks between layers; many tokens ask in any case, to see an interrupt in between."""
    if cancel is not None:
        return cancel.is_set
    return _never if tokens >= _MANY else None


def _never() -> bool:
    return False
