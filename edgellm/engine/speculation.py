"""Decoding with drafts: several tokens in one step where a guess turns out right."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from edgellm.engine.draft import DraftPolicy, PromptLookup
from edgellm.errors import CacheFullError

Floats = NDArray[np.float32]


class Speculation:
    """Gives the logits after each token that was sampled, computed together with a draft.

    A row has the same bits however many come with it, so whatever is sampled from it is what would
    have been sampled without drafts: greedy text is the same, and so is sampled text of a seed.

    Args:
        steps: computes tokens at the end of the sequence, and gives the logits after each `[n, V]`.
        forget: takes so many tokens off the end of the sequence.
        tokens: what was there before the first sampled token; None drafts nothing.

    Attributes:
        drafted, accepted: tokens so far.
    """

    def __init__(
        self,
        steps: Callable[[SequenceOf[int]], Floats],
        forget: Callable[[int], None],
        tokens: SequenceOf[int] | None,
    ) -> None:
        self._steps = steps
        self._forget = forget
        self._lookup = None if tokens is None else PromptLookup(tokens)
        self._policy = DraftPolicy()
        self._ahead: deque[tuple[int, Floats]] = deque()
        self._last: tuple[float, int] | None = None  # seconds and length of the draft on its way
        self._hits = 0
        self.drafted = self.accepted = 0

    def after(self, token: int, *, room: int) -> Floats:
        """The logits `[V]` after `token`.

        Args:
            room: tokens that may still come, this one left out.
        """
        if self._lookup is not None:
            self._lookup.add(token)
        if self._ahead and self._ahead[0][0] == token:
            self._hits += 1
            self.accepted += 1
            return self._ahead.popleft()[1]
        self._settle()
        draft = self._draft(room)
        start = time.perf_counter()
        try:
            rows = self._steps([token, *draft])
        except CacheFullError:
            if not draft:
                raise
            draft, rows = [], self._steps([token])
        seconds = time.perf_counter() - start
        if draft:
            self._last = (seconds, len(draft))
            self.drafted += len(draft)
            self._ahead.extend(zip(draft, rows[1:], strict=True))
        else:
            self._policy.plain(seconds)
        first: Floats = rows[0]
        return first

    def _settle(self) -> None:
        """Take back what was computed of a draft and did not come true."""
        if self._ahead:
            self._forget(len(self._ahead))
            self._ahead.clear()
        if self._last is not None:
            seconds, drafted = self._last
            self._policy.drafted(seconds, drafted=drafted, accepted=self._hits)
            self._last, self._hits = None, 0

    def _draft(self, room: int) -> list[int]:
        if self._lookup is None:
            return []
        return self._lookup.draft(min(self._policy.length(), room))
