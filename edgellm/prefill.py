"""The chunked prefill executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.forward import Model
from edgellm.kv_cache import Sequence
from edgellm.planner import plan_chunks
from edgellm.providers import Placement

# Called with tokens done and tokens in all.
Progress = Callable[[int, int], None]


class PrefillExecutor:
    """Runs prompts in chunks of static size into the KV cache."""

    def __init__(self, model: Model, *, flavour: str) -> None:
        self._model = model
        self.flavour = flavour

    @property
    def placement(self) -> Placement:
        return self._model.segments.placement

    def run(
        self,
        tokens: SequenceOf[int],
        sequence: Sequence,
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
        on_hidden: Callable[[NDArray[np.float32]], None] | None = None,
    ) -> NDArray[np.float32]:
        """Evaluate `tokens` at the end of `sequence`.

        Args:
            on_hidden: called with each chunk's hidden states `[n, E]`, padding left out.

        Returns:
            The logits of the last token, `[V]`; no other row goes through the LM head.

        Raises:
            ContextOverflowError, CacheFullError: they do not fit.
            CancelledError: `cancel` was set; finished chunks stay in the sequence.
        """
        done = 0
        for chunk, count in plan_chunks(len(tokens), self._model.segments.chunk_sizes):
            hidden = self._model.forward(
                tokens[done : done + count], sequence, chunk=chunk, cancel=cancel
            )
            done += count
            if on_hidden is not None:
                on_hidden(hidden)
            if progress is not None:
                progress(done, len(tokens))
        last: NDArray[np.float32] = self.logits(hidden[-1:])[0]
        return last

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """The LM head on hidden states `[rows, E]`: `[rows, V]`."""
        return self._model.head.logits(hidden)
