"""Drafts from a model's hidden states: by its own head, or by an assistant beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.mtp import MtpModel
from edgellm.cache.kv_cache import KVCache
from edgellm.cache.sequence import Sequence
from edgellm.engine.draft_policy import DraftSource, Evidence, StateDrafter
from edgellm.kernels.sampling import Logits
from edgellm.options import MOST_DRAFTED

Floats = NDArray[np.float32]

# Rows that it catches up with in one step at most, so that a stream has no long gap.
_ROWS = 256
# Hidden states that wait for it at most, of an answer and of all that have ended: 40 MB each where
# they have 2,560 numbers. Of a longer prompt it knows the end alone.
_MOST_WAITING = 4096
# Last hidden states that an assistant keeps: the longest draft of any drafter may be wrong.
_KEPT = MOST_DRAFTED + 1


@dataclass(frozen=True)
class _End:
    """Hidden states at the last tokens of an answer that has ended."""

    tokens: list[int]
    hidden: Floats


def _key(sequence: Sequence) -> int:
    return hash((sequence.root, *sequence.tokens))


@dataclass(frozen=True, kw_only=True)
class MtpHead(DraftSource):
    """The head of a loaded model, or its assistant, for drafts of all its answers.

    Attributes:
        cache: KV cache of a head's layer; None: an assistant, which reads the model's.
    """

    name = "mtp"
    model: MtpModel
    cache: KVCache | None
    _ends: dict[int, _End] = field(default_factory=dict)

    def keep(self, sequence: Sequence, end: _End) -> None:
        """Keep what waits behind a sequence for answers that begin with its tokens.

        Without it a head sees nothing before a chat's new turn: 25 % of a random head's drafts were
        then those that it makes of the whole text, and 79 % with it, where rounding changes some.
        """
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

    def drafter(self, salt: str) -> StateDrafter:
        if self.cache is None:
            return AssistantDrafter(self)
        return MtpDrafter(self, self.cache, salt=salt)

    def guess(
        self, sequence: Sequence, hidden: Floats, logits: Logits, *, count: int, known: int
    ) -> list[int]:
        """Guess at most `count` tokens behind a row, by its logits and its hidden state.

        Args:
            known: number of tokens before them, of which the context has room for more.
        """
        draft, count = list[int](), min(count, self.ctx_size - known)
        while len(draft) < count:
            ((token, logprob),) = logits.best(1).items()
            if math.exp(logprob) < self.p_min:
                break
            draft.append(token)
            if len(draft) < count:  # its own hidden states stand in for the model's
                hidden, logits = self.model.run(sequence, [token], hidden[-1:])
        return draft


class AssistantDrafter:
    """Drafter of one answer by an assistant, which reads K and V of the answer's own sequence.

    All tokens of a draft stand at the position behind the last one that has K and V.
    """

    name = MtpHead.name

    def __init__(self, head: MtpHead) -> None:
        self._head = head
        self._sequence: Sequence | None = None
        self._hidden = np.empty((0, 0), np.float32)  # of the last ones of the first `_end` tokens
        self._end = 0

    def computed(self, tokens: SequenceOf[int], sequence: Sequence, hidden: Floats) -> None:
        """See `StateDrafter`."""
        end = len(sequence)
        if len(hidden):
            self._hidden = hidden[-_KEPT:].copy()
        else:
            left = len(self._hidden) + end - self._end
            self._hidden = self._hidden[: max(0, left) if end <= self._end else 0]
        self._sequence, self._end = sequence, end

    def evidence(self, tokens: SequenceOf[int]) -> Evidence | None:
        """See `Drafter`; None where the last hidden state is missing, or its context is full."""
        known = len(tokens) - 1
        there = self._sequence is not None and len(self._sequence) == self._end == known
        if not (there and len(self._hidden)) or len(tokens) >= self._head.ctx_size:
            return None
        return Evidence(self._head.kind)

    def propose(self, tokens: SequenceOf[int], count: int) -> list[int]:
        """See `Drafter`; none where a full context has just forgotten some tokens."""
        sequence = self._sequence
        if sequence is None or self.evidence(tokens) is None:
            return []
        hidden, logits = self._head.model.run(sequence, tokens[-1:], self._hidden[-1:])
        return self._head.guess(sequence, hidden, logits, count=count, known=len(tokens))

    def close(self) -> None:
        """Forget what it has of an answer."""
        self._sequence, self._hidden = None, self._hidden[:0]


class MtpDrafter:
    """Drafter of one answer by a head, with a row for each token but the first.

    A row takes the hidden state at the token before, and is computed when a draft is wanted; until
    then the state waits. Where the model finds tokens in its KV cache, the head has the rows of an
    earlier answer; else it begins behind these tokens, and sees none of them.
    """

    name = MtpHead.name

    def __init__(self, head: MtpHead, cache: KVCache, *, salt: str) -> None:
        self._head = head
        self._cache = cache
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

    def computed(self, tokens: SequenceOf[int], sequence: Sequence, hidden: Floats) -> None:
        """See `StateDrafter`."""
        start = len(sequence) - len(hidden)
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
        sequence = self._sequence
        if sequence is None or not self._waiting:
            return []
        rows, self._waiting = self._waiting[:_ROWS], self._waiting[_ROWS:]
        begin = self._first + 1 + len(sequence)
        hidden, logits = self._head.model.run(
            sequence, tokens[begin : begin + len(rows)], np.stack(rows)
        )
        if self._waiting:
            return []
        own = len(sequence)
        if sequence.shareable is None:  # rows of a draft are for no other answer; truncated below
            sequence.shareable = own
        draft = self._head.guess(sequence, hidden, logits, count=count, known=len(tokens))
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
        self._first = 0
        # rows do not name the first token
        root = self._cache.index.salted_root(f"{self._salt} {tokens[0]}")
        self._sequence = self._cache.sequence(tokens[1 : start + 1], root=root)
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
