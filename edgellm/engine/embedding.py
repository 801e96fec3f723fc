"""Embeddings of texts: hidden states of their tokens after the final norm, pooled."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import WORKING, Pending, finished
from edgellm.engine.request import Request
from edgellm.generation_options import GenerationOptions
from edgellm.options import Pooling


class EmbeddingRequest(Request):
    """A prompt that is computed for its hidden states alone, in the same steps as answers.

    Attributes:
        embedding: `[E]` float32 of norm 1; None before the end.
    """

    def __init__(
        self,
        context: Context,
        *,
        pooling: Pooling,
        owner: str = "",
        adapter: str | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        options = GenerationOptions(
            max_tokens=0, owner=owner, adapter=adapter, speculate=False, seed=0
        )
        super().__init__(context, Call(options=options, cancel=cancel), closes=True)
        self.embedding: NDArray[np.float32] | None = None
        self._pooling = pooling
        self._sum: NDArray[np.float64] | None = None

    @property
    def findable(self) -> int:
        return 0 if self._pooling == "mean" else super().findable

    def begin(self) -> None:
        """Begin, see `Request.begin`; a mean uses no cached tokens, as they have no states."""
        super().begin()
        self._sum = None
        if self._pooling == "mean":
            self.context.sequence.truncate(0)

    @property
    def wants_states(self) -> bool:
        return True

    def _candidates(self) -> int:
        return 0  # where a back end gives the best logits alone, it gives no hidden states

    def computed_states(self, rows: Rows) -> None:
        """Pool the hidden states of rows with those of the rows before."""
        hidden = rows.hidden.astype(np.float64)
        if len(hidden) and self._pooling == "last":
            self._sum = hidden[-1]
        elif len(hidden):
            # row by row behind those before: the same bits however steps cut the prompt
            before = np.zeros_like(hidden[:1]) if self._sum is None else self._sum[None]
            self._sum = np.add.reduce(np.concatenate([before, hidden]), axis=0)
        if rows.logits and self._sum is not None:
            length = float(np.linalg.norm(self._sum))
            self.embedding = (self._sum / (length or 1.0)).astype(np.float32)


def embeddings(
    engine: Engine,
    prompts: SequenceOf[SequenceOf[int]],
    *,
    pooling: Pooling,
    salt: str = "",
    owner: str = "",
    adapter: str | None = None,
    cancel: threading.Event | None = None,
) -> Pending[NDArray[np.float32]]:
    """Embed prompts of token ids; yields an embedding `[E]` float32 for each, in their order.

    Args:
        salt: see `Context`.
        owner, adapter: see `GenerationOptions`.
        cancel: event after which no more embeddings come.

    Raises:
        OptionError, ContextOverflowError: see `Request.check`.
    """
    yield WORKING
    requests: list[EmbeddingRequest] = []
    for prompt in prompts:
        context = Context(engine, prompt, salt=salt)
        request = EmbeddingRequest(
            context, pooling=pooling, owner=owner, adapter=adapter, cancel=cancel
        )
        request.check()
        requests.append(request)
    with closing(finished(engine.loop, requests)) as pending:
        for item in pending:
            if not isinstance(item, EmbeddingRequest):
                yield item
            elif item.embedding is None:  # cancelled
                return
            else:
                yield item.embedding
