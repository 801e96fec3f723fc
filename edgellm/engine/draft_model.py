"""Drafts of a smaller model of the same vocabulary, with a KV cache of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from edgellm.backends.batch import Backend, Span
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.prefix_index import Root, common_prefix
from edgellm.cache.sequence import Sequence
from edgellm.engine.draft_policy import DraftSource, Evidence

# Tokens that it catches up with in one step at most, so that a stream has no long gap.
_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class DraftModel(DraftSource):
    """A smaller model that is loaded beside another one, for drafts of all its answers.

    Attributes:
        rows: rows of the smaller of both embeddings; larger ids mean nothing to one of the models.
    """

    name = "model"
    decoder: Backend
    cache: KVCache
    rows: int

    def drafter(self, salt: str) -> ModelDrafter:
        return ModelDrafter(self, root=self.cache.index.salted_root(salt))


class ModelDrafter:
    """Drafter of one answer, with the answer's tokens in the draft model's KV cache.

    What was rejected is cut off there, and what was accepted is computed with the next draft.
    """

    name = DraftModel.name

    def __init__(self, model: DraftModel, *, root: Root) -> None:
        self._model = model
        self._root = root
        self._sequence: Sequence | None = None
        self._agreed = 0  # first tokens of the answer that the sequence has

    def evidence(self, tokens: SequenceOf[int]) -> Evidence | None:
        """See `Drafter`; None where its context is full, or a token is none of its own."""
        if len(tokens) >= self._model.ctx_size:
            return None
        self._agreed = self._agree(tokens, self._held(tokens).tokens)
        if max(tokens[self._agreed :]) >= self._model.rows:
            return None
        return Evidence(self._model.kind, behind=len(tokens) - self._agreed)

    def propose(self, tokens: SequenceOf[int], count: int) -> list[int]:
        """See `Drafter`; none while it catches up.

        Raises:
            CacheFullError: its KV cache has no room, beside those of other answers.
        """
        sequence = self._held(tokens)
        sequence.truncate(self._agreed)
        behind, draft = list(tokens[len(sequence) :]), list[int]()
        if len(behind) > _ROWS:
            self._model.decoder.run([Span(sequence, behind[:_ROWS], all_states=False)])
            return draft
        room = self._model.ctx_size - len(tokens) + 1
        while len(draft) < min(count, room):
            token, probability = self._best(sequence, behind, drafted=len(draft))
            if probability < self._model.p_min or token >= self._model.rows:
                break
            draft.append(token)
            behind = [token]
        return draft

    def close(self) -> None:
        """Give its blocks back; answers that begin with the same tokens find them."""
        sequence, self._sequence, self._agreed = self._sequence, None, 0
        if sequence is not None:
            sequence.close()

    def _held(self, tokens: SequenceOf[int]) -> Sequence:
        """Return its sequence, at first the longest cached prefix of `tokens`."""
        if self._sequence is None:
            self._sequence = self._model.cache.sequence(tokens[:-1], root=self._root)
        return self._sequence

    def _agree(self, tokens: SequenceOf[int], held: SequenceOf[int]) -> int:
        """Count the tokens that it need not compute: all but the last one at most."""
        known = min(self._agreed, len(tokens) - 1, len(held))
        if tokens[:known] != held[:known]:  # a full context has forgotten some
            known = 0
        return known + common_prefix(tokens[known:-1], held[known:])

    def _best(
        self, sequence: Sequence, tokens: SequenceOf[int], *, drafted: int
    ) -> tuple[int, float]:
        """Compute tokens; returns the most likely one after them, and its probability."""
        span = Span(sequence, tokens, logit_rows=1, candidates=1, drafted=drafted, all_states=False)
        (rows,) = self._model.decoder.run([span])
        ((token, logprob),) = rows.logits[0].best(1).items()
        return token, math.exp(logprob)
