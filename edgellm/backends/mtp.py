"""Heads and assistants that predict the token after the next, on the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.packed_weights import MtpWeights
from edgellm.cache.groups import Blocks
from edgellm.cache.sequence import Sequence
from edgellm.kernels.kv_append.portable import normalized
from edgellm.kernels.linear import rows_of
from edgellm.kernels.linear.native import linear
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sampling import Logits, rows_of_logits
from edgellm.kernels.step import FusedStep, LayerGroup, StepSpan

Floats = NDArray[np.float32]


class MtpModel:
    """A head with a KV cache of its own, or an assistant that reads the model's, in fused steps.

    Args:
        pools: pools of its own cache, or those of the model.
    """

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

        An assistant takes one row, which stands behind the tokens of a sequence of the model, and
        adds nothing.

        Args:
            tokens: token of each row.
            hidden: hidden state behind the final norm at the token before, of each row `[n, E]`.

        Returns:
            Hidden states to go on with `[n, E]`, and the best logit behind the last row.

        Raises:
            ContextOverflowError, CacheFullError: see `Sequence.reserve`.
        """
        entering, project = self._entering(tokens, hidden), self._weights.project
        if project is not None:
            sequence.use_host()
            # its RoPE is that of the position behind the last one, see `open_assistant`
            states, logits = self._compute(sequence, len(sequence) - 1, entering)
            states = linear(self._library, states, project, fine=True, threads=self._threads)
        else:
            with sequence.reserved(len(tokens)):
                states, logits = self._compute(sequence, len(sequence), entering)
                sequence.commit(tokens)
        return states, rows_of_logits(logits, [1], threads=self._threads)[0]

    def _entering(self, tokens: SequenceOf[int], hidden: Floats) -> Floats:
        """Compute what enters the first layer, from the embedding and the hidden state."""
        weights, epsilon = self._weights, self._weights.step.epsilon
        embedded = rows_of(weights.embedding, tokens) * np.float32(weights.embedding_scale)
        norms = weights.embedding_norm, weights.hidden_norm
        halves = [
            x if norm is None else normalized(x[:, None], norm, epsilon)[:, 0]
            for x, norm in zip((embedded, hidden), norms, strict=True)
        ]
        x = np.concatenate(halves, axis=1)
        return linear(self._library, x, weights.combine, fine=True, threads=self._threads)

    def _compute(self, sequence: Sequence, start: int, entering: Floats) -> tuple[Floats, Floats]:
        span = StepSpan(
            tables=sequence.block_tables,
            tokens=[0] * len(entering),  # what enters is no embedding
            start=start,
            logit_rows=1,
            heads=sequence.heads,
        )
        group = LayerGroup(layers=range(len(self._weights.step.layers)), entering=entering)
        result = self._step.run([span], threads=self._threads, group=group)
        assert result is not None  # nothing stops it
        return result
