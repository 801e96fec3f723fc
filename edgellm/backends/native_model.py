"""A model in the native kernels: the tokens of a step go through all layers in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows, Span, cut, reserved, step_span
from edgellm.backends.softcap import softcapped
from edgellm.errors import CancelledError
from edgellm.kernels.kv_blocks import KVBlocks
from edgellm.kernels.linear import PackedWeights, rows_of
from edgellm.kernels.linear.native import linear
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.step import FusedStep, Weights

Floats = NDArray[np.float32]


class PackedHead:
    """The LM head and the embedding in packed weights; see `Head` in `segments.py`."""

    def __init__(self, library: ctypes.CDLL, weights: Weights, *, threads: int) -> None:
        self._library = library
        self._weights = weights
        self._threads = threads

    def embed(self, tokens: SequenceOf[int]) -> Floats:
        """Return embedding rows `[n, E]`."""
        return rows_of(self._weights.embedding, tokens)

    def logits(self, hidden: Floats) -> Floats:
        """Return logits `[rows, V]` of hidden states `[rows, E]`."""
        head = self._weights.head
        logits = linear(self._library, hidden, head, fine=True, threads=self._threads)
        return softcapped(logits, self._weights.logit_softcap)


class NativeModel:
    """A model whose tokens go through the fused step on the shared KV cache."""

    best_rows: int | None = None

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Weights,
        ropes: SequenceOf[RopeTable],
        pools: SequenceOf[KVBlocks],
        *,
        threads: int,
    ) -> None:
        """Take over the weights.

        Args:
            ropes: RoPE tables that layers name by their index, for the whole context.
            pools: pools of KV blocks that layers name by their index.
        """
        self.head = PackedHead(library, weights, threads=threads)
        self._library = library
        self._step = FusedStep(library, weights, ropes, pools)
        self._layers = len(weights.layers)
        self._threads = threads

    def run(
        self, spans: SequenceOf[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        """See `StepModel.run`; all spans of one call have the same group of layers."""
        group = spans[0].group
        assert all(span.group is group for span in spans)
        with reserved(spans):
            for span in spans:
                span.sequence.use_host()
            result = self._step.run(
                [step_span(span) for span in spans],
                threads=self._threads,
                should_stop=should_stop,
                group=group,
            )
            if result is None:
                raise CancelledError("cancelled between two layers")
            if group is None or group.layers.stop == self._layers:
                for span in spans:
                    span.sequence.commit(span.tokens)
        return cut(spans, *result, threads=self._threads)

    def linear(self, x: Floats, weight: PackedWeights, *, fine: bool = False) -> Floats:
        """See `StepModel.linear`."""
        return linear(self._library, x, weight, fine=fine, threads=self._threads)

    def logits(self, hidden: Floats) -> Floats:
        """See `StepModel.logits`."""
        return self.head.logits(hidden)
