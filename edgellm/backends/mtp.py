"""A head that predicts the token after the next, on the C++ kernels; see `graphs/mtp.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.packed_weights import MtpWeights
from edgellm.cache.groups import Blocks
from edgellm.cache.sequence import Sequence
from edgellm.kernels.linear import rows_of
from edgellm.kernels.linear.native import linear
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sampling import Logits, rows_of_logits
from edgellm.kernels.step import FusedStep, LayerGroup, StepSpan

Floats = NDArray[np.float32]


class MtpModel:
    """A head whose rows go through the fused step, with a KV cache of its own."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: MtpWeights,
        ropes: SequenceOf[RopeTable],
        pools: SequenceOf[Blocks],
        *,
        threads: int,
    ) -> None:
        self._library = library
        self._weights = weights
        self._step = FusedStep(library, weights.step, ropes, pools)
        self._threads = threads

    def run(
        self, sequence: Sequence, tokens: SequenceOf[int], hidden: Floats
    ) -> tuple[Floats, Logits]:
        """Add rows to a sequence of the head's own cache.

        Args:
            tokens: token of each row.
            hidden: hidden state behind the final norm at the token before, of each row `[n, E]`.

        Returns:
            Hidden states behind the head's final norm `[n, E]`, and the best logit behind the last.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
        """
        weights, epsilon = self._weights, self._weights.step.epsilon
        halves = (
            _normed(rows_of(weights.embedding, tokens), weights.embedding_norm, epsilon),
            _normed(hidden, weights.hidden_norm, epsilon),
        )
        x = np.concatenate(halves, axis=1)
        entering = linear(self._library, x, weights.combine, fine=True, threads=self._threads)
        with sequence.reserved(len(tokens)):
            span = StepSpan(
                tables=sequence.block_tables,
                tokens=[0] * len(tokens),  # what enters is no embedding
                start=len(sequence),
                logit_rows=1,
            )
            group = LayerGroup(layers=range(1), entering=entering)
            result = self._step.run([span], threads=self._threads, group=group)
            assert result is not None  # nothing stops it
            sequence.commit(tokens)
        states, logits = result
        return states, rows_of_logits(logits, [1], threads=self._threads)[0]


def _normed(x: Floats, weight: Floats, epsilon: float) -> Floats:
    scale = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(epsilon))
    return np.asarray(x / scale * weight, np.float32)
