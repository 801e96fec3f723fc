"""Decoding with drafts: several tokens in one step where a guess turns out right."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

from edgellm.engine.draft import DraftPolicy, PromptLookup
from edgellm.kernels.sampling import Logits


class Speculation:
    """Drafts of an answer, with the logits after their tokens until the sampled tokens are known.

    A row has the same bits however many come with it, so sampling from it gives the same token as
    without drafts: greedy text is the same, and so is sampled text of a seed.

    Args:
        most: number of last tokens that drafts are looked up in; 0: no drafts.

    Attributes:
        drafted, accepted: number of draft tokens so far, and of accepted ones.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lookup: PromptLookup | None = None
        self._policy = DraftPolicy()
        self._draft: list[int] = []
        self._ahead: deque[tuple[int, Logits]] = deque()
        self._seconds: float | None = None
        self._hits = 0
        self.drafted = self.accepted = 0

    def draft(self, room: int, tokens: SequenceOf[int]) -> list[int]:
        """Draft at most `room` tokens to compute together with the token sampled last.

        Args:
            tokens: tokens of the prompt, and sampled tokens.
        """
        self._draft = self._guess(room, tokens)
        return self._draft

    def computed(self, logits: SequenceOf[Logits], *, seconds: float | None) -> None:
        """Keep the logits after each token of the draft, if there was one.

        Args:
            seconds: seconds that the step took; None if other requests were in it.
        """
        self._seconds, self._hits = seconds, 0
        self._ahead.extend(zip(self._draft[: len(logits)], logits, strict=True))
        self.drafted += len(logits)

    def after(self, token: int) -> Logits | None:
        """Return the logits after a sampled token; None if the draft did not have it."""
        if self._lookup is not None:
            self._lookup.add(token)
        if not self._ahead or self._ahead[0][0] != token:
            return None
        self._hits += 1
        self.accepted += 1
        return self._ahead.popleft()[1]

    def _guess(self, room: int, tokens: SequenceOf[int]) -> list[int]:
        if not self._most:
            return []
        count = min(self._policy.length(), room)
        if count < 1:
            return []
        # 277 bytes and 0.9 µs a token: only for a lone request, and only for its last tokens
        if self._lookup is None or len(self._lookup) > 2 * self._most:
            self._lookup = PromptLookup(tokens[-self._most :])
        return self._lookup.draft(count)

    def settle(self) -> int:
        """End a step's draft; returns the number of rejected tokens at the sequence's end."""
        wrong, self._draft = len(self._ahead), []
        self._ahead.clear()
        if self._seconds is not None:
            if self._hits + wrong:
                drafted = self._hits + wrong
                self._policy.drafted(self._seconds, drafted=drafted, accepted=self._hits)
            else:
                self._policy.plain(self._seconds)
        self._seconds = None
        return wrong
