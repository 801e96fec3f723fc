"""Drafts of a model's own head, which predicts the token after the next from hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.mtp import MtpModel
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.engine.draft_policy import Purse
from edgellm.engine.drafter import Evidence, Kind

Floats = NDArray[np.float32]

# Rows that it catches up with in one step at most, so that a stream has no long gap.
_ROWS = 256
# Hidden states that wait for it at most, of an answer and of all that have ended: 40 MB each where
# they have 2,560 numbers. Of a longer prompt it knows the end alone.
_MOST_WAITING = 4096
# Share of its tokens that are right, until some are known, and the weight of those before.
_SHARE, _KEEP = 0.7, 0.95


@dataclass(frozen=True)
class _End:
    """Hidden states at the last tokens of an answer that has ended."""

    tokens: list[int]
    hidden: Floats


def _key(sequence: Sequence) -> int:
    return hash((sequence.root, *sequence.tokens))


@dataclass(frozen=True)
class MtpHead:
    """The head of a loaded model, for drafts of all its answers.

    Attributes:
        cache: KV cache of its layer.
        ctx_size: number of tokens behind which it drafts nothing.
        tokens: largest number of tokens of a draft.
        p_min: probability of its best token below which a draft ends before the token.
        token_steps: steps of the model that one of its rows takes as long as, about.
        purse: see `Purse`.
    """

    model: MtpModel
    cache: KVCache
    ctx_size: int
    tokens: int
    p_min: float
    token_steps: float
    purse: Purse = field(default_factory=Purse)
    _ends: dict[int, _End] = field(default_factory=dict)

    def keep(self, sequence: Sequence, end: _End) -> None:
        """Keep what waits behind a sequence for answers that begin with its tokens."""
        key = _key(sequence)
        self._ends.pop(key, None)
        self._ends[key] = end
        while sum(len(each.tokens) for each in self._ends.values()) > _MOST_WAITING:
            del self._ends[next(iter(self._ends))]

    def waiting(self, sequence: Sequence, tokens: SequenceOf[int]) -> list[Floats]:
        """Return the hidden states that waited behind a sequence, at `tokens`; else none."""
        end = self._ends.get(_key(sequence))
        if end is None or end.tokens[: len(tokens)] != list(tokens):
            return []
        return list(end.hidden[: len(tokens)])

    @property
    def kind(self) -> Kind:
        return Kind("mtp", _SHARE, self.tokens, keep=_KEEP, token_steps=self.token_steps)

    def drafter(self, salt: str) -> MtpDrafter:
        """Return a drafter for one answer; see `Context` for `salt`."""
        return MtpDrafter(self, salt=salt)


class MtpDrafter:
    """Drafter of one answer, with a row of the head for each token but the first.

    A row takes the hidden state at the token before, and is computed when a draft is wanted; until
    then the state waits. Where the model finds tokens in its KV cache, the head has the rows of an
    earlier answer; else it begins behind these tokens, and sees none of them.
    """

    name = "mtp"

    def __init__(self, head: MtpHead, *, salt: str) -> None:
        self._head = head
        self._salt = salt
        self._sequence: Sequence | None = None
        self._tokens: SequenceOf[int] = ()
        self._first = 0  # tokens of the answer before its first row's hidden state
        self._waiting: list[Floats] = []  # hidden states of the next rows

    @property
    def _rows(self) -> int:
        """Number of rows that it has."""
        return 0 if self._sequence is None else len(self._sequence)

    @property
    def _end(self) -> int:
        """Number of tokens up to the last one of which it knows the hidden state."""
        return self._first + self._rows + len(self._waiting)

    def computed(self, tokens: SequenceOf[int], start: int, hidden: Floats) -> None:
        """Take the hidden states of the tokens from `start` on, some of which may be a draft's.

        Without any, forget those from `start` on.

        Args:
            tokens: tokens of the prompt, and sampled tokens, as far as they are known.
        """
        if self._sequence is None or not self._first <= start <= self._end:
            if not len(hidden):
                return
            self._begin(tokens, start)
        self._tokens = tokens
        self._cut(start)
        self._waiting.extend(hidden.copy())
        if len(self._waiting) > _MOST_WAITING:
            rows = len(self._waiting) - _MOST_WAITING
            waiting = self._waiting[rows:]
            self._begin(tokens, start + len(hidden) - len(waiting))
            self._waiting = waiting

    def evidence(self, tokens: SequenceOf[int]) -> Evidence | None:
        """See `Drafter`; None where hidden states are missing, or its context is full."""
        known = len(tokens) - 1
        if self._sequence is None or len(tokens) >= self._head.ctx_size or self._end < known:
            return None
        self._cut(known)
        rows = tokens[self._first + 1 : self._first + 1 + self._rows]
        if self._first > known or self._sequence.tokens != list(rows):
            self._waiting = []  # a full context has forgotten some
            self.close()
            return None
        return Evidence(self._head.kind, behind=len(self._waiting))

    def propose(self, tokens: SequenceOf[int], count: int) -> list[int]:
        """See `Drafter`; none while it catches up.

        Raises:
            CacheFullError: its KV cache has no room, beside those of other answers.
        """
        sequence, draft = self._sequence, list[int]()
        if sequence is None or not self._waiting:
            return draft
        rows, self._waiting = self._waiting[:_ROWS], self._waiting[_ROWS:]
        begin = self._first + 1 + len(sequence)
        hidden, logits = self._head.model.run(
            sequence, tokens[begin : begin + len(rows)], np.stack(rows)
        )
        if self._waiting:
            return draft
        own = len(sequence)
        if sequence.shareable is None:  # rows of a draft are for no other answer; truncated below
            sequence.shareable = own
        room = min(count, self._head.ctx_size - len(tokens))
        while len(draft) < room:
            ((token, logprob),) = logits.best(1).items()
            if math.exp(logprob) < self._head.p_min:
                break
            draft.append(token)
            if len(draft) < room:  # its own hidden states stand in for the model's
                hidden, logits = self._head.model.run(sequence, [token], hidden[-1:])
        sequence.truncate(own)
        return draft

    def close(self) -> None:
        """Give its blocks back; answers that begin with the same tokens find them."""
        sequence, waiting = self._sequence, self._waiting
        self._sequence, self._waiting = None, []
        if sequence is None:
            return
        if waiting and sequence.shareable is None:
            behind = list(self._tokens[len(sequence) : len(sequence) + len(waiting)])
            if behind:
                self._head.keep(sequence, _End(behind, np.stack(waiting[: len(behind)])))
        sequence.close()

    def _begin(self, tokens: SequenceOf[int], start: int) -> None:
        """Begin behind `start` tokens, with the rows of all before where its cache has them."""
        self.close()
        self._first, cache = 0, self._head.cache
        # rows do not name the first token
        root = cache.index.salted_root(f"{self._salt} {tokens[0]}")
        self._sequence = cache.sequence(tokens[1 : start + 1], root=root)
        self._waiting = self._head.waiting(self._sequence, tokens[len(self._sequence) : start])
        if self._end < start:
            self._sequence.truncate(0)
            self._sequence.shareable = 0
            self._first, self._waiting = start, []

    def _cut(self, end: int) -> None:
        """Forget what follows on the first `end` tokens."""
        rows = max(0, end - self._first)
        if self._sequence is not None and rows < self._rows:
            self._sequence.truncate(rows)
        del self._waiting[max(0, rows - self._rows) :]
